import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.evaluate import benchmarks

TASK = """
task: local_choice
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: answer
doc_to_choice: choices
metric_list:
  - metric: acc
  - metric: acc_norm
"""
QUESTIONS = [
    {"question": "import torch\nimport", "choices": [" os", " zebra"], "answer": 0},
    {"question": "def main(", "choices": ["self", ":::"], "answer": 1},
    {"question": "return", "choices": [" value", " None", " 7"], "answer": 1},
]


@pytest.fixture
def tasks(tmp_path):
    """A folder with one task whose data set is a local file."""
    data = tmp_path / "questions.jsonl"
    data.write_text("\n".join(map(json.dumps, QUESTIONS)))
    (tmp_path / "local_choice.yaml").write_text(TASK.format(data=data))
    return tmp_path


def log_likelihood(model, tokenizer, question, choice):
    prompt, whole = tokenizer.encode(question), tokenizer.encode(question + choice)
    with torch.no_grad():
        scores = model(torch.tensor([whole])).logits[0].log_softmax(-1)
    return sum(scores[i - 1, whole[i]].item() for i in range(len(prompt), len(whole)))


def test_a_local_task_without_a_network(exported, tasks, tmp_path):
    pytest.importorskip("lm_eval")
    output, table = tmp_path / "out.json", tmp_path / "out.csv"
    arguments = ["--export", exported, "--tasks", "local_choice", "--include-path", tasks]
    arguments += ["--output", output, "--table", table]
    benchmarks.main([*map(str, arguments)])
    summary = json.loads(output.read_text())
    scores = summary["tasks"]["local_choice"]

    model = AutoModelForCausalLM.from_pretrained(exported)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    correct = 0
    for question in QUESTIONS:
        likelihoods = [
            log_likelihood(model, tokenizer, question["question"], choice)
            for choice in question["choices"]
        ]
        correct += likelihoods.index(max(likelihoods)) == question["answer"]
    assert math.isclose(scores["metrics"]["acc,none"], correct / len(QUESTIONS))
    assert summary["average"] == scores["score"]
    assert "Kaiyuan-2B,published average (other tasks),,59.07" in table.read_text()


def test_an_unknown_task_is_refused(exported, tmp_path):
    pytest.importorskip("lm_eval")
    with pytest.raises(SystemExit, match="knows no task no_such_task"):
        benchmarks.main(
            ["--export", str(exported), "--tasks", "no_such_task", "--output", "unused.json"]
        )


def test_the_main_score_is_the_normalised_one_or_the_most_lenient_filter():
    results = {
        "results": {
            "hellaswag": {
                "alias": "h",
                "acc,none": 0.3,
                "acc_norm,none": 0.4,
                "acc_stderr,none": 1,
            },
            "gsm8k": {"exact_match,strict-match": 0.1, "exact_match,flexible-extract": 0.2},
        },
        "n-shot": {"hellaswag": 0, "gsm8k": 5},
    }
    summary = benchmarks.summarize(results, ["hellaswag", "gsm8k"])
    assert summary["tasks"]["hellaswag"]["score"] == pytest.approx(40)
    assert summary["tasks"]["gsm8k"]["score"] == pytest.approx(20)
    assert summary["average"] == pytest.approx(30)
