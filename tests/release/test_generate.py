import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.release import generate


def test_continuations_are_the_most_likely_tokens(exported, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def main\n\n港口\n", encoding="utf-8")
    output = tmp_path / "out.json"
    arguments = ["--export", exported, "--prompts", prompts, "--output", output]
    generate.main([*map(str, arguments), "--max-new-tokens", "8"])
    result = json.loads(output.read_text())
    assert (result["iteration"], result["max_new_tokens"]) == (100, 8)
    assert [entry["prompt"] for entry in result["continuations"]] == ["def main", "港口"]
    for entry in result["continuations"]:
        assert entry["continuation"] == greedy_without_cache(exported, entry["prompt"], 8)


def greedy_without_cache(folder, prompt, count):
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.encode(prompt)
    for _ in range(count):
        with torch.no_grad():
            ids.append(model(torch.tensor([ids])).logits[0, -1].argmax().item())
        if ids[-1] == model.config.eos_token_id:
            break
    return tokenizer.decode(ids[len(tokenizer.encode(prompt)) :], skip_special_tokens=True)


def test_the_projects_own_prompts_can_be_read():
    assert len(generate.read_prompts(generate.PROMPTS)) > 3


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", "\n \n", "holds no prompt"),
        ("a.json", '{"a": 1}', "not a JSON list"),
        ("b.json", '["a", 1]', "not a JSON list"),
        ("c.json", "[", "not valid JSON"),
    ],
)
def test_bad_prompts_are_refused(exported, tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(SystemExit, match=message):
        generate.main(
            ["--export", str(exported), "--prompts", str(tmp_path / name), "--output", "x.json"]
        )


def test_a_checkpoint_continues_as_its_export_does(
    exported, checkpoint, model_file, tokenizer_folder, tmp_path
):
    run = ["--checkpoint", checkpoint, "--model", model_file, "--tokenizer", tokenizer_folder]
    for name, arguments in {"export": ["--export", exported], "checkpoint": run}.items():
        output = tmp_path / f"{name}.json"
        generate.main([*map(str, arguments), "--output", str(output), "--max-new-tokens", "4"])
    assert (tmp_path / "export.json").read_text() == (tmp_path / "checkpoint.json").read_text()
