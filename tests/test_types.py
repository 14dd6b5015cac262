"""What type checkers make of programs that use radixrt."""

from __future__ import annotations

import ast
import inspect
from dataclasses import fields
from pathlib import Path

import pytest

from radixrt import SamplingParams, sampling_params
from radixrt.form_spec import NESTED

PROGRAM = """
from contextlib import closing
from dataclasses import dataclass

from radixrt import RequestOutput, Runtime, SamplingParams, ScoreOutput


@dataclass
class Person:
    name: str


lists = SamplingParams(stop=["a"], stop_token_ids=[1], logit_bias={1: 2.0}, bad_words=["a", [1]], choice=["a"])
texts = SamplingParams(stop="a", stop_regex="a+", json_schema={"type": "object"}, max_new_tokens=None)
others = SamplingParams(max_tokens=8, guided_json=Person, allowed_token_ids=[1, 2])


def scores(runtime: Runtime) -> tuple[list[ScoreOutput], list[list[ScoreOutput]]]:
    return runtime.score(["a"], ["b"]), runtime.score(["a"], [["b", "c"]])


async def answers(runtime: Runtime) -> tuple[RequestOutput, list[RequestOutput], list[list[ScoreOutput]]]:
    one, many = await runtime.async_generate("a"), await runtime.async_generate(["a", "b"], texts)
    return one, many, await runtime.async_score(["a"], [["b", "c"]])


def beginnings(runtime: Runtime) -> tuple[str, str]:
    with closing(runtime.stream("a")) as chunks, closing(runtime.generate_iter(["a", "b"])) as outputs:
        return next(chunks).text, next(outputs).text
"""


def test_what_parameters_take_has_their_names_and_defaults() -> None:
    (init,) = (
        node
        for node in ast.walk(ast.parse(inspect.getsource(sampling_params)))
        if isinstance(node, ast.FunctionDef) and node.args.args[0].arg == "self" and node.args.kwonlyargs
    )
    typed = [argument.arg for argument in init.args.args[1:]]
    defaults = [ast.literal_eval(default) for default in init.args.defaults]
    assert dict(zip(typed, defaults, strict=True)) == {
        field.name: field.default for field in fields(SamplingParams)
    }
    assert typed == [field.name for field in fields(SamplingParams)]
    assert {argument.arg for argument in init.args.kwonlyargs} == {*sampling_params.SPELLINGS, *NESTED}


@pytest.mark.long  # half a minute where mypy has not looked at the packages yet
def test_a_program_is_typed(tmp_path: Path) -> None:
    mypy = pytest.importorskip("mypy.api", reason="mypy is not installed: pip install 'radixrt[lint]'")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    found, problems, status = mypy.run(["--strict", str(program)])
    assert (status, problems) == (0, ""), found
