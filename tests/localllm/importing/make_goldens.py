"""Make goldens.json: the names of each tiny model's tensors, and the logits that transformers computes of them.

Needs torch, transformers and safetensors, which the project does not; run it where they are:

    python make_goldens.py goldens.json
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors import safe_open
from tiny_models import CONFIGS, TOKENS, write_weights


def golden(config: dict) -> dict:
    """Shapes of the tensors as they are saved, and the logits of TOKENS in float32."""
    values = dict(config)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
        model = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16)
        model.save_pretrained(folder)
        with safe_open(folder / "model.safetensors", "np") as file:
            shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118
        write_weights(folder, shapes)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        with torch.no_grad():
            logits = model(torch.tensor([TOKENS])).logits[0].numpy()
        saved = json.loads((folder / "config.json").read_text())
    return {"config": saved, "shapes": shapes, "logits": np.round(logits[-1].astype(float), 5).tolist()}


made = {name: golden(config) for name, config in CONFIGS.items()}
Path(sys.argv[1]).write_text(json.dumps(made, separators=(",", ":")) + "\n")
