"""Make transformers_goldens.json: the shapes of each twin's tensors, and what transformers computes of them.

Needs gguf, and torch and transformers, which the project does not. Run it from the root of the project, where they are:

    python -m tests.models.make_transformers_goldens tests/models/transformers_goldens.json
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.localllm.wings.importing.tiny_models import TOKENS
from tests.models.transformers_models import TWINS, Twin, weights


def golden(twin: Twin) -> dict[str, Any]:
    """Shapes, and rows: logits of the last token, the mean of an encoder's states, or scores of the first tokens."""
    values = dict(twin.config)
    made = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    kind = getattr(transformers, f"AutoModelFor{twin.kind}" if twin.kind else "AutoModel")
    model = kind.from_config(made, dtype=torch.float32, attn_implementation="eager").eval()
    shapes = {name: list(value.shape) for name, value in model.state_dict().items() if value.dim()}
    found = {name: torch.tensor(value) for name, value in weights(shapes).items()}
    model.load_state_dict({**model.state_dict(), **found}, strict=True)
    with torch.no_grad():
        if twin.kind == "SequenceClassification":
            rows = [model(torch.tensor([TOKENS[:end]])).logits[0, 0] for end in range(1, len(TOKENS) + 1)]
        elif twin.kind:
            rows = model(torch.tensor([TOKENS])).logits[0, -1]
        else:
            rows = model(torch.tensor([TOKENS])).last_hidden_state[0].mean(0)
    return {"shapes": shapes, "row": [round(float(value), 5) for value in rows]}


if __name__ == "__main__":
    made = {name: golden(twin) for name, twin in TWINS.items()}
    Path(sys.argv[1]).write_text(json.dumps(made, separators=(",", ":")) + "\n")
