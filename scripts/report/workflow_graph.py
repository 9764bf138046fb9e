"""Puts the graph of the workflow's rules into pages, as a Mermaid diagram grouped by stage.

    snakemake --directory EMPTY --profile profiles/smoke --rulegraph mermaid-js \\
        | python -m scripts.report.workflow_graph README.md README.zh.md

`make docs` runs it. The directory is an empty one because finished shards are left out of a graph.
A stage is a file of rules/; Snakemake's own colours are dropped, so that the diagram follows the
reader's light or dark page. What follows from other arrows is left out, and so is the rule `all`.
"""

import argparse
import re
import sys
from pathlib import Path

from scripts.common.files import replacing

RULES = Path(__file__).resolve().parents[2] / "rules"
BLOCK = re.compile(r"(<!-- rule graph: made by `make docs` -->\n).*?(<!-- end -->)", re.DOTALL)
NODE = re.compile(r"^\t(id\d+)\[(\w+)\]$", re.MULTILINE)
EDGE = re.compile(r"^\t(id\d+) --> (id\d+)$", re.MULTILINE)


def stages() -> dict[str, str]:
    """Returns the stage of each rule: the name of the file in rules/ that has it."""
    return {
        rule: path.stem
        for path in sorted(RULES.glob("*.smk"))
        for rule in re.findall(r"^ *rule (\w+):", path.read_text(encoding="utf-8"), re.MULTILINE)
    }


def diagram(rulegraph: str) -> str:
    """Returns the Mermaid text of a rule graph as Snakemake prints it, in a fixed order."""
    names = dict(NODE.findall(rulegraph))
    edges = {(names[a], names[b]) for a, b in EDGE.findall(rulegraph) if names[b] != "all"}
    if not edges:
        raise ValueError("standard input holds no graph of `snakemake --rulegraph mermaid-js`")
    stage_of = stages()
    lines = ["flowchart LR"]
    for stage in dict.fromkeys(stage_of.values()):
        rules = [rule for rule in stage_of if stage_of[rule] == stage and rule in names.values()]
        if rules:
            lines += [f"  subgraph {stage}.smk", *(f"    {rule}" for rule in rules), "  end"]
    arrows = (f"  {before} --> {after}" for before, after in sorted(direct(edges)))
    return "\n".join([*lines, *arrows])


def direct(edges: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Returns the edges that do not follow from others; those of a rule to itself stay."""
    after: dict[str, set[str]] = {}
    for first, second in edges:
        if first != second:
            after.setdefault(first, set()).add(second)

    def reached(rules: set[str]) -> set[str]:
        return rules.union(*(reached(after.get(rule, set())) for rule in rules))

    return {
        (first, second)
        for first, second in edges
        if first == second or second not in reached(after[first] - {second})
    }


def insert(page: str, text: str) -> str:
    """Returns the page with the diagram between its two comments."""
    page, count = BLOCK.subn(rf"\g<1>```mermaid\n{text}\n```\n\g<2>", page)
    if count != 1:
        raise ValueError("the page has no place for the graph, or more than one")
    return page


def main(argv: list[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", type=Path, nargs="+", help="Markdown files to change")
    arguments = parser.parse_args(argv)
    try:
        text = diagram(sys.stdin.read())
        for page in arguments.pages:
            changed = insert(page.read_text(encoding="utf-8"), text)
            with replacing(page) as partial:
                partial.write_text(changed, encoding="utf-8")
    except (OSError, ValueError) as error:
        sys.exit(f"workflow_graph: {error}")


if __name__ == "__main__":
    main()
