"""Fast transformer layers for Megatron from torch and Triton alone.

What Transformer Engine's layers fuse, these fuse too, without anything to compile: residual add and
RMSNorm, QK-norm and rotation, SwiGLU, output layer and cross entropy, fp32 accumulation of weight
gradients inside the product, AdamW. On a machine without CUDA the same modules run in plain torch.

    choice     which layers a run takes (`layers: auto | fast | transformer_engine | local`)
    modules    the layer spec and the loss
    functions  the operations with their gradients
    kernels    the Triton kernels
    optimizer  AdamW and clipping

docs/profiling.md has the numbers.
"""
