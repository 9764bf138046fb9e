"""Triton kernels for the memory-bound parts of a Qwen3 layer; `functions` gives them gradients.

Each kernel reads every input once and writes every output once: at these sizes (hundreds of MB a
tensor) the time of a kernel is its traffic. Arithmetic is fp32, storage is the tensors' dtype.
Rows are tokens; every last dimension is contiguous. With TRITON_INTERPRET=1 they run on a CPU.
"""

import torch
import triton
import triton.language as tl


def program_count(tokens: int, per_multiprocessor: int, device: torch.device) -> int:
    """Returns how many programs share `tokens` rows, each with its own partial weight gradient."""
    if device.type != "cuda":
        return min(tokens, 3)  # the interpreter: more than one, to test the partial sums
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return min(tokens, per_multiprocessor * multiprocessors)


@triton.jit
def rms_norm_forward(
    x, delta, weight, total, normed, columns, epsilon, HAS_DELTA: tl.constexpr, BLOCK: tl.constexpr
):
    """total = x + delta; normed = RMSNorm(total) * weight, one row a program."""
    start = tl.program_id(0).to(tl.int64) * columns
    column = tl.arange(0, BLOCK)
    inside = column < columns
    value = tl.load(x + start + column, mask=inside, other=0.0)
    if HAS_DELTA:
        value += tl.load(delta + start + column, mask=inside, other=0.0)
        tl.store(total + start + column, value, mask=inside)
    value = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value) / columns + epsilon)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + start + column, value * scale * gain, mask=inside)


@triton.jit
def rms_norm_backward(
    grad_normed,
    grad_total,
    total,
    weight,
    grad_x,
    grad_weight,
    rows,
    columns,
    epsilon,
    HAS_GRAD_TOTAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """grad_x = RMSNorm's input gradient + grad_total; one partial weight gradient a program."""
    column = tl.arange(0, BLOCK)
    inside = column < columns
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    grad_gain = tl.zeros([BLOCK], dtype=tl.float32)
    for row in range(tl.program_id(0).to(tl.int64), rows, tl.num_programs(0)):
        at = row * columns + column
        value = tl.load(total + at, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_normed + at, mask=inside, other=0.0).to(tl.float32)
        result = tl.zeros([BLOCK], dtype=tl.float32)
        if HAS_GRAD_TOTAL:
            result = tl.load(grad_total + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value) / columns + epsilon)
        unit = value * scale
        grad_gain += grad * unit
        grad *= gain
        result += scale * (grad - unit * (tl.sum(grad * unit) / columns))
        tl.store(grad_x + at, result, mask=inside)
    tl.store(grad_weight + tl.program_id(0) * columns + column, grad_gain, mask=inside)


@triton.jit
def qk_norm_rope_forward(
    qkv,
    query_weight,
    key_weight,
    cosines,
    sines,
    query,
    key,
    batch_size,
    epsilon,
    QUERY_HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """RMSNorm of each query and key head, then the rotation, one token a program.

    `qkv` is Megatron's layout: a group holds its query heads, one key head and one value head.
    A head's two halves are loaded apart, because the rotation pairs element i with i + HEAD / 2.
    """
    GROUP: tl.constexpr = QUERY_HEADS // KEY_HEADS
    HALF: tl.constexpr = HEAD // 2
    token = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    is_query = row < QUERY_HEADS
    group = tl.where(is_query, row // GROUP, row - QUERY_HEADS)
    slot = tl.where(is_query, row % GROUP, GROUP)
    inside = (row < QUERY_HEADS + KEY_HEADS) & (column < HALF)
    source = qkv + token * (KEY_HEADS * (GROUP + 2) * HEAD)
    source += (group * (GROUP + 2) + slot) * HEAD + column
    low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)

    square = tl.sum(low * low + high * high, axis=1)[:, None]
    scale = tl.rsqrt(square / HEAD + epsilon)
    gain = tl.where(is_query, query_weight + column, key_weight + column)
    low *= scale * tl.load(gain, mask=inside, other=0.0).to(tl.float32)
    high *= scale * tl.load(gain + HALF, mask=inside, other=0.0).to(tl.float32)

    rotation = (token // batch_size) * HALF + column
    cosine = tl.load(cosines + rotation, mask=column < HALF, other=0.0)
    sine = tl.load(sines + rotation, mask=column < HALF, other=0.0)
    first = low * cosine - high * sine
    second = high * cosine + low * sine
    to_query = query + token * (QUERY_HEADS * HEAD) + row * HEAD + column
    tl.store(to_query, first, mask=inside & is_query)
    tl.store(to_query + HALF, second, mask=inside & is_query)
    to_key = key + token * (KEY_HEADS * HEAD) + group * HEAD + column
    tl.store(to_key, first, mask=inside & (row >= QUERY_HEADS))
    tl.store(to_key + HALF, second, mask=inside & (row >= QUERY_HEADS))


@triton.jit
def qk_norm_rope_backward(
    grad_query,
    grad_key,
    grad_value,
    qkv,
    query_weight,
    key_weight,
    cosines,
    sines,
    grad_qkv,
    grad_weights,
    tokens,
    batch_size,
    query_stride_s,
    query_stride_b,
    query_stride_h,
    key_stride_s,
    key_stride_b,
    key_stride_h,
    value_stride_s,
    value_stride_b,
    value_stride_h,
    epsilon,
    QUERY_HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradients of query, key and value back into Megatron's qkv layout.

    `grad_weights` [programs, 2, HEAD]: each program's sums for the query and the key weight.
    """
    GROUP: tl.constexpr = QUERY_HEADS // KEY_HEADS
    HALF: tl.constexpr = HEAD // 2
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    is_query = row < QUERY_HEADS
    is_key = (row >= QUERY_HEADS) & (row < QUERY_HEADS + KEY_HEADS)
    is_value = (row >= QUERY_HEADS + KEY_HEADS) & (row < QUERY_HEADS + 2 * KEY_HEADS)
    group = tl.where(is_query, row // GROUP, (row - QUERY_HEADS) % KEY_HEADS)
    slot = tl.where(is_query, row % GROUP, tl.where(is_key, GROUP, GROUP + 1))
    in_head = column < HALF
    normed = (is_query | is_key) & in_head
    offset = (group * (GROUP + 2) + slot) * HEAD + column

    gain = tl.where(is_query, query_weight + column, key_weight + column)
    low_gain = tl.load(gain, mask=normed, other=0.0).to(tl.float32)
    high_gain = tl.load(gain + HALF, mask=normed, other=0.0).to(tl.float32)
    low_sum = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    high_sum = tl.zeros([ROWS, BLOCK], dtype=tl.float32)

    for token in range(tl.program_id(0).to(tl.int64), tokens, tl.num_programs(0)):
        position = token // batch_size
        sequence = token % batch_size
        from_query = grad_query + position * query_stride_s + sequence * query_stride_b
        from_key = grad_key + position * key_stride_s + sequence * key_stride_b
        from_value = grad_value + position * value_stride_s + sequence * value_stride_b
        source = tl.where(
            is_query,
            from_query + row * query_stride_h + column,
            tl.where(
                is_key,
                from_key + group * key_stride_h + column,
                from_value + group * value_stride_h + column,
            ),
        )
        loaded = (row < QUERY_HEADS + 2 * KEY_HEADS) & in_head
        first = tl.load(source, mask=loaded, other=0.0).to(tl.float32)
        second = tl.load(source + HALF, mask=loaded, other=0.0).to(tl.float32)
        start = token * (KEY_HEADS * (GROUP + 2) * HEAD) + offset
        low = tl.load(qkv + start, mask=normed, other=0.0).to(tl.float32)
        high = tl.load(qkv + start + HALF, mask=normed, other=0.0).to(tl.float32)

        cosine = tl.load(cosines + position * HALF + column, mask=in_head, other=0.0)
        sine = tl.load(sines + position * HALF + column, mask=in_head, other=0.0)
        grad_low = first * cosine + second * sine
        grad_high = second * cosine - first * sine
        scale = tl.rsqrt(tl.sum(low * low + high * high, axis=1)[:, None] / HEAD + epsilon)
        low *= scale
        high *= scale
        low_sum += grad_low * low
        high_sum += grad_high * high
        grad_low *= low_gain
        grad_high *= high_gain
        mean = tl.sum(grad_low * low + grad_high * high, axis=1)[:, None] / HEAD
        grad_low = tl.where(is_value, first, scale * (grad_low - low * mean))
        grad_high = tl.where(is_value, second, scale * (grad_high - high * mean))
        tl.store(grad_qkv + start, grad_low, mask=loaded)
        tl.store(grad_qkv + start + HALF, grad_high, mask=loaded)

    target = grad_weights + tl.program_id(0) * 2 * HEAD + tl.arange(0, BLOCK)
    inside = tl.arange(0, BLOCK) < HALF
    tl.store(target, tl.sum(tl.where(is_query, low_sum, 0.0), axis=0), mask=inside)
    tl.store(target + HALF, tl.sum(tl.where(is_query, high_sum, 0.0), axis=0), mask=inside)
    tl.store(target + HEAD, tl.sum(tl.where(is_key, low_sum, 0.0), axis=0), mask=inside)
    tl.store(target + HEAD + HALF, tl.sum(tl.where(is_key, high_sum, 0.0), axis=0), mask=inside)


@triton.jit
def swiglu_forward(gate_up, output, columns, BLOCK: tl.constexpr):
    """output = silu(gate) * up; a row of `gate_up` holds `columns` gates, then `columns` ups."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    source = gate_up + row * 2 * columns + column
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + row * columns + column, gate * tl.sigmoid(gate) * up, mask=inside)


@triton.jit
def swiglu_backward(grad_output, gate_up, grad_gate_up, columns, BLOCK: tl.constexpr):
    """Gradients of both halves of `gate_up`."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    at = row * 2 * columns + column
    gate = tl.load(gate_up + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + at + columns, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_output + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    grad_gate = grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    tl.store(grad_gate_up + at, grad_gate, mask=inside)
    tl.store(grad_gate_up + at + columns, grad * gate * sigmoid, mask=inside)


@triton.jit
def cross_entropy_forward(logits, labels, loss, log_sum, columns, BLOCK: tl.constexpr):
    """loss = log(sum(exp(logits))) - logits[label], one row a program, in one pass."""
    row = tl.program_id(0).to(tl.int64)
    source = logits + row * columns
    largest = -float("inf")
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(source + column, mask=column < columns, other=-float("inf"))
        value = value.to(tl.float32)
        new_largest = tl.maximum(largest, tl.max(value))
        total = total * tl.exp(largest - new_largest) + tl.exp(value - new_largest)
        largest = new_largest
    result = largest + tl.log(tl.sum(total))
    label = tl.load(labels + row)
    tl.store(log_sum + row, result)
    tl.store(loss + row, result - tl.load(source + label).to(tl.float32))


@triton.jit
def cross_entropy_backward(logits, labels, grad_loss, log_sum, columns, BLOCK: tl.constexpr):
    """Replaces the logits by their gradient: (softmax - one_hot(label)) * grad_loss."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    at = logits + row * columns + column
    value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    probability = tl.exp(value - tl.load(log_sum + row))
    hit = column == tl.load(labels + row)
    grad = (probability - hit.to(tl.float32)) * tl.load(grad_loss + row)
    tl.store(at, grad, mask=inside)
