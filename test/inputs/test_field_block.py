"""The block of fields in a template, and the order of its fields in staged lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from input_files import contents_of, lines_of, staged

from sglang_batch.__main__ import _parser
from sglang_batch.errors import ConfigError
from sglang_batch.inputs import field_sample
from sglang_batch.inputs.field_sample import FieldSample
from sglang_batch.inputs.job_input import JobInput, input_sources
from sglang_batch.inputs.staging import Staging
from sglang_batch.inputs.template import Template
from sglang_batch.run.run_options import job_input

CONTENT = """Is it a toy?
{{#fields}}Name: {{name}}
Maker: {{maker}}, {{country}}

Kind: {{kind}}{{/fields}}
Answer:"""


def template(content: str, **more: Any) -> Template:
    return Template({"messages": [{"role": "user", "content": content}], **more})


def products(tmp_path: Path, rows: int, name: str = "products.csv") -> Path:
    path = tmp_path / name
    lines = [
        f'Thing {i},Maker "{i % 20}",Country {i % 4},Kind é{i % 3}' for i in range(rows)
    ]
    quoted = [
        ",".join(f'"{x.replace(chr(34), chr(34) * 2)}"' for x in line.split(","))
        for line in lines
    ]
    path.write_text("\n".join(["name,maker,country,kind", *quoted]) + "\n")
    return path


def test_without_the_option_a_block_is_in_its_own_order(tmp_path: Path) -> None:
    table = products(tmp_path, 5)
    found = staged(tmp_path, table, template=template(CONTENT))
    plain = CONTENT.replace("{{#fields}}", "").replace("{{/fields}}", "")
    other = tmp_path / "other"
    other.mkdir()
    same = staged(other, table, template=template(plain))
    assert found.path.read_bytes() == same.path.read_bytes()
    assert contents_of(found)[1] == (
        'Is it a toy?\nName: Thing 1\nMaker: Maker "1", Country 1\n\nKind: Kind é1\nAnswer:'
    )


@pytest.mark.slow
def test_fields_change_places_with_their_labels_and_other_lines_stay(
    tmp_path: Path,
) -> None:
    table = products(tmp_path, 200)
    own = staged(tmp_path, table, template=template(CONTENT))
    contents = contents_of(own)
    found = staged(tmp_path, table, template=template(CONTENT), optimize_fields=True)
    for before, after in zip(contents, contents_of(found), strict=True):
        lines = before.split("\n")
        name, maker, kind = lines[1], lines[2], lines[4]
        # Makers are longer than kinds, and names are all different.
        assert after.split("\n") == [lines[0], maker, kind, "", name, lines[5]]
    assert [line["custom_id"] for line in lines_of(found)] == list(map(str, range(200)))
    saving = found.fields
    assert saving is not None and saving.rows == saving.sampled == 200
    assert saving.bytes < saving.own_bytes / 2


def test_orders_are_found_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = products(tmp_path, 50)
    options = {"template": template(CONTENT), "optimize_fields": True}
    first = staged(tmp_path, table, **options)
    content = first.path.read_bytes()
    monkeypatch.setattr(FieldSample, "orders", None)  # not called again
    again = staged(tmp_path, table, **options)
    assert again == first and again.path.read_bytes() == content


def test_several_tables_are_one_and_each_keeps_its_rows(tmp_path: Path) -> None:
    tables = [products(tmp_path, rows, f"{rows}.csv") for rows in (0, 7, 30, 0)]
    found = staged(
        tmp_path, *tables, template=template(CONTENT), optimize_fields=True, max_requests=20
    )  # fmt: skip
    assert len(lines_of(found)) == 20
    assert found.line_name(8) == f"{tables[2]}, row 0"
    assert [Path(part.name).stem for part in found.parts] == ["0", "7", "30"]


def test_a_column_before_the_block_counts(tmp_path: Path) -> None:
    """Prompts that begin with their name share no field after it."""
    table = products(tmp_path, 60)
    named = template("{{name}}: " + CONTENT, max_tokens=5)
    found = staged(tmp_path, table, template=named, optimize_fields=True)
    assert found.fields is not None
    assert found.fields.bytes == found.fields.own_bytes
    own = staged(tmp_path, table, template=named)
    assert contents_of(found) == contents_of(own)
    # One next to the prompt does not.
    body = {"user": "{{name}}", "messages": named.body["messages"]}
    body["messages"] = [{"role": "user", "content": CONTENT}]
    found = staged(tmp_path, table, template=Template(body), optimize_fields=True)
    assert found.fields is not None
    assert found.fields.bytes < found.fields.own_bytes


def test_a_large_table_is_sampled_evenly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = products(tmp_path, 1000)
    monkeypatch.setattr(
        FieldSample.__init__, "__kwdefaults__", {"max_values": 300, "max_chars": 10**6}
    )
    found = staged(tmp_path, table, template=template(CONTENT), optimize_fields=True)
    assert found.fields is not None
    assert (found.fields.rows, found.fields.sampled) == (1000, 63)
    assert "by a sample of 63 rows" in str(found.fields)
    for i, content in enumerate(contents_of(found)):
        lines = content.split("\n")
        assert lines[1] == f'Maker: Maker "{i % 20}", Country {i % 4}'
        assert sorted(lines[1:5])[1:] == [
            f"Kind: Kind é{i % 3}", f'Maker: Maker "{i % 20}", Country {i % 4}', f"Name: Thing {i}"
        ]  # fmt: skip


def test_few_different_characters_are_kept() -> None:
    sample = FieldSample(2, head=False, max_chars=100)
    for i in range(100):
        sample.add("", [f"text {i}", "same"])
    order_of, saving = sample.orders()
    assert 1 < saving.sampled < 20 and saving.rows == 100
    assert list(order_of(99, "", ["text 99", "same"])) == [1, 0]
    assert field_sample.MAX_CHARS > 100


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{{#fields}}none{{/fields}} {{name}}", "has no column"),
        ("{{#fields}}{{name}}", "has no end: write {{/fields}} in the same string"),
        ("{{name}}{{/fields}}", "has {{/fields}} without {{#fields}} before it"),
        ("{{#fields}}{{#fields}}{{name}}{{/fields}}{{/fields}}", "inside of a block"),
        ("{{#fields}}{{name}}{{/fields}}" * 2, "has several blocks"),
    ],
)
def test_a_block_that_is_none_is_refused(content: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        template(content)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_block_is_inside_of_one_string() -> None:
    block = "{{#fields}}{{name}}{{/fields}}"
    for text, said in (
        ('{"prompt": ' + block + "}", "must be inside of a string"),
        ('{"' + block + '": 1}', "has a block: write {{#fields}} inside of a value"),
        (json.dumps({"prompt": [block, block]}), "has several blocks"),
        (json.dumps({"prompt": ["{{#fields}}{{name}}", "{{/fields}}"]}), "has no end"),
    ):
        with pytest.raises(ConfigError, match="fields") as error:
            Template.parse(text)
        assert said in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--optimize-fields can be used only with --template"),
        (["--template", '{"prompt": "{{name}}"}'], "has nothing to reorder"),
    ],
)
def test_the_option_needs_a_block(arguments: list[str], said: str) -> None:
    options = _parser().parse_args(
        ["run", "-i", "-", "-o", "out", "--optimize-fields", *arguments]
    )
    with pytest.raises(ConfigError, match=said):
        job_input(options).check()


def test_lines_in_own_order_are_kept_where_asked(tmp_path: Path) -> None:
    table = products(tmp_path, 30)
    inputs = JobInput(
        input_sources([str(table)]), template(CONTENT), optimize_fields=True
    )
    (tmp_path / "kept").mkdir()
    Staging(tmp_path / "kept", tmp_path / "own.jsonl").stage(inputs)
    own = staged(tmp_path, table, template=template(CONTENT))
    assert (tmp_path / "own.jsonl").read_bytes() == own.path.read_bytes()
