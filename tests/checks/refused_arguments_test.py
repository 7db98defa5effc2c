#!/usr/bin/env python3
"""What Accelerator::prepare refuses at compile time, and what the message says.

One program with an argument of each wrong kind, and right ones, is compiled, no further
than its syntax: every reason must be in the compiler's output, with the argument's number.
"""

import os
import pathlib
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import check_headers  # noqa: E402

PROGRAM = """
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include "hasten/accelerator/accelerator.h"

struct Row {
  std::string text{};
  int label = 0;
};
struct Sentence {
  std::string text{};
  at::Tensor ids{};
};
template <typename Visit>
void flatten(Visit& visit, Sentence& batch) {
  visit(batch.ids);
}

void use(hasten::Accelerator& accelerator) {
  torch::nn::Linear net(2, 1);
  torch::optim::SGD sgd(net->parameters(), 0.1);
  std::vector<Sentence> batches;
  std::vector<std::pair<at::Tensor, std::vector<int>>> pairs;
  std::unique_ptr<std::vector<at::Tensor>> owned;
  std::vector<Row> rows;
  const int number = 0;
  accelerator.prepare(net, sgd, batches, pairs, *owned);
  // CALLS
}
"""
CALLS = {
    "net, *net": "argument is a module itself. Fix: pass its holder",
    "net, torch::optim::SGD(net->parameters(), 0.1)": "argument is a temporary, which is destroyed too soon. Fix: keep it",
    "net, owned": "argument is a std::unique_ptr. Fix: pass the object it points to",
    "net, rows": "no tensor is found in this range's batches. Fix: batches that are",
    "net, number": "argument is no model, optimizer, scheduler",
}


class RefusedArguments(unittest.TestCase):
    def test_each_wrong_one_is_named_with_its_reason(self):
        calls = "".join(f"  accelerator.prepare({call});\n" for call in CALLS)
        torch = pathlib.Path(os.environ.get("HASTEN_TORCH") or check_headers.cache_folder() / "libtorch")
        with tempfile.TemporaryDirectory() as folder:
            unit = pathlib.Path(folder) / "unit.cpp"
            unit.write_text(PROGRAM.replace("// CALLS", calls))
            _, output = check_headers.Compiler(ROOT, torch).run(["-fsyntax-only", str(unit)])
        for call, reason in CALLS.items():
            self.assertIn(reason, output, call)
        self.assertIn("Argument = 2", output)
        self.assertNotIn("Argument = 3", output, "the right ones")
        self.assertNotIn("constraints not satisfied", output)


if __name__ == "__main__":
    unittest.main()
