"""What an interrupted evaluation continues from: finished rounds, and the head after the last."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from surefeat.eval.fewshot_result import Record
from surefeat.keypoint_head import KeypointHead
from surefeat.runs import write_bytes, write_text


@dataclass(frozen=True)
class Cache:
    """Files of one row under one key."""

    stem: Path
    """Folder, and how the names begin."""

    @property
    def file(self) -> Path:
        return self.stem.with_name(f"{self.stem.name}.jsonl")

    def _head_file(self, seed: int) -> Path:
        return self.stem.with_name(f"{self.stem.name}-seed{seed}.safetensors")

    def records(self) -> list[Record]:
        """Finished rounds, oldest first; a line that a crash cut off is removed from the file."""
        if not self.file.exists():
            return []
        lines, found = self.file.read_text().splitlines(), []
        for line in lines:
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                break
        if len(found) < len(lines):
            self._write(found)
        return found

    def start_over(self, seed: int) -> list[Record]:
        """The records of the other seeds: this one's can not be continued."""
        kept = [record for record in self.records() if record["seed"] != seed]
        self._write(kept)
        return kept

    def _write(self, records: Sequence[Record]) -> None:
        write_text(self.file, "".join(json.dumps(each) + "\n" for each in records))

    def add(self, record: Record, head: KeypointHead | None) -> None:
        """A finished round, and the head that the seed's next one starts from; None: it was last.

        The head's file says which round it is of: after a crash between the two writes they do not
        fit, `load_head` refuses, and the seed starts over.
        """
        from safetensors.torch import save

        seed, path = record["seed"], self._head_file(record["seed"])
        if head is not None:
            state = {key: value.detach().cpu().contiguous() for key, value in
                     head.state_dict().items()}  # fmt: skip
            write_bytes(path, save(state, {"round": str(record["round"])}))
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a") as file:
            file.write(json.dumps(record) + "\n")
        if head is None:
            self._head_file(seed).unlink(missing_ok=True)

    def load_head(self, head: KeypointHead, record: Record) -> bool:
        """Fill the head as it was after the record's round; False where that is not known."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self._head_file(record["seed"]), framework="pt") as file:
                if (file.metadata() or {}).get("round") != str(record["round"]):
                    return False
                state = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError):
            return False
        head.load_state_dict(state)
        return True
