"""Prints the hash of a file of the reference writer, for tests/io/safetensors_test.cpp.

Run: python tools/golden/safetensors_golden.py   (needs torch, safetensors, libxxhash)
"""

import ctypes
import ctypes.util

import torch
from safetensors.torch import save


def main():
    tensors = {
        "layer.weight": torch.arange(12).float().view(3, 4),
        "layer.bias": torch.arange(3).float(),
        "half": torch.arange(5).half(),
        "brain": torch.arange(5).bfloat16(),
        "ids": torch.arange(4),
        "double": torch.arange(2).double(),
        "mask": torch.arange(3) > 0,
        "bytes": torch.arange(7).to(torch.uint8),
        "short": torch.arange(3).short(),
        "int": torch.arange(3).int(),
        "complex": torch.arange(2).to(torch.complex64),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        'n\u00e4me "x"\n': torch.arange(1).float(),
    }
    library = ctypes.CDLL(ctypes.util.find_library("xxhash"))
    library.XXH3_64bits.restype = ctypes.c_uint64
    content = save(tensors, {"format": "pt"})
    print(f"{library.XXH3_64bits(content, ctypes.c_size_t(len(content))):016x}")


main()
