"""`python -m tests.chaos [FIRST [LAST]]`: runs these cases, or all, and prints how each went."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from tests.chaos.cases import Case, covering
from tests.chaos.disturbed import disturb, losses_of, start


def main() -> int:
    """Run cases; 1 if something is wrong with one."""
    first, last = (int(word) for word in (sys.argv[1:] + ["0", "1000"][len(sys.argv) - 1 :]))
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        folder = Path(name)
        (folder / "seed").mkdir()
        code, text = start(Case("none", "none", 2, 1, "autopar"), folder / "seed")
        undisturbed = [loss for _, _, loss, _ in losses_of(text)]
        assert code == 0, text
        saves = folder / "saves"
        shutil.copytree(folder / "seed" / "saves", saves)
        for path in sorted(saves.iterdir())[1:]:
            shutil.rmtree(path)
        for number, case in enumerate(covering()):
            if first <= number <= last:
                outcome = disturb(case, folder / str(number), saves, undisturbed)
                print(f"{number:2} {outcome}", flush=True)
                wrong += bool(outcome.faults)
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
