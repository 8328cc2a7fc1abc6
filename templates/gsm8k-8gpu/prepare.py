"""Downloads GSM8K from the hub (openai/gsm8k, 2.7 MB) and writes train.jsonl and test.jsonl."""

import json
import sys
from pathlib import Path

import pyarrow.parquet
from huggingface_hub import hf_hub_download

INSTRUCTION = ' Reason step by step, and end with "#### " and the number.'


def main() -> None:
    for split in ("train", "test"):
        try:
            path = hf_hub_download("openai/gsm8k", f"main/{split}-00000-of-00001.parquet", repo_type="dataset")
        except OSError as error:  # huggingface_hub's own errors are OSErrors, too
            why = next(iter(str(error).strip().splitlines()), type(error).__name__)
            sys.exit(f"error: GSM8K cannot be downloaded: {why}\nhint: call it where huggingface.co can be "
                     "reached, or copy both files")
        rows = pyarrow.parquet.read_table(path).to_pylist()
        lines = (json.dumps(line_of(row)) for row in rows)
        Path(f"{split}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        print(f"wrote {split}.jsonl: {len(rows)} problems")


def line_of(row: dict) -> dict:
    """A problem as `asyncrl` reads it: the prompt as messages, and the number behind "####"."""
    answer = row["answer"].rpartition("####")[2].strip().replace(",", "")
    return {"prompt": [{"role": "user", "content": row["question"] + INSTRUCTION}], "answer": answer}


if __name__ == "__main__":
    main()
