"""Run the model with and without the op: python run.py [cpu|npu]"""

import sys

import torch
from model import Model

import liteboost_adaptor

device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
if device == "npu":
    import torch_npu

torch.manual_seed(0)
model, x = Model().to(device), torch.randn(2, 5, 64).to(device)
with torch.no_grad():
    expected = model(x)
    liteboost_adaptor.apply(model)
    found = model(x)
print(f"largest difference: {(found - expected).abs().max().item():.1e}")
