"""PyTorch's `index_copy_` and an index in brackets, on a CPU: an index past the end, a negative one, and one row for two."""

import torch


def copied(rows, index, new):
    rows.index_copy_(0, index, new)


def put(rows, index, new):
    rows[index] = new


for name, write in (("index_copy_", copied), ("rows[index]", put)):
    for index, new in (([1, 2, 4], [[7.0]] * 3), ([1, -1], [[7.0]] * 2), ([1, 2], [[7.0]])):
        rows = torch.zeros(4, 1)
        try:
            write(rows, torch.tensor(index), torch.tensor(new))
            end = "passes"
        except (IndexError, RuntimeError) as error:
            end = type(error).__name__
        print(f"{name}, {len(new)} new to {index} of 4 rows: {end}, and the rows are {rows.flatten().tolist()}")
