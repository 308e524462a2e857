import torch
from torchao.prototype.mx_formats.mx_tensor import MXTensor

rows = torch.full((1, 32), 2.0**-120)
for element in (torch.float8_e4m3fn, torch.float4_e2m1fn_x2):
    stored = MXTensor.to_mx(rows, element)
    print(element, stored.scale.view(torch.uint8).item(), (stored.dequantize() / rows)[0, 0].item())
