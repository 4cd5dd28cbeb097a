"""Numbers in the options of all commands."""

from __future__ import annotations

import pytest

from sglang_batch.__main__ import main


@pytest.mark.parametrize("number", ["\u0663", "\uff13", "\u00b2", "1\u0660"])
@pytest.mark.parametrize(
    "command",
    [
        "list --limit {}",
        "submit -i x --priority {}",
        "run -i x -o y --model-path m --max-inflight {}",
        "simulate --trace {}",
        "simulate --mix 1 --num-requests {}",
        "simulate --mix 1 --seed {}",
    ],
)
def test_digits_of_other_scripts_are_refused(
    command: str, number: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = command.format(number).split()
    try:
        status = main(arguments)
    except SystemExit as error:
        status = int(str(error.code))
    assert status == 2
    assert repr(number) in capsys.readouterr().err
