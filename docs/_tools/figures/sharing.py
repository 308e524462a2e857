"""Figures of "Sequences that share", measured on kvref's own caches."""

import matplotlib.pyplot as plt
import numpy as np

from kvref import PagedCache, PagedConfig, PrefixCache
from kvref.attention import attention
from kvref.rope import Rotary, rotary_frequencies

ONE = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 1}
SHARED, ALONE = "#2f7fd1", "#b3261e"


def draw_blocks_of_forks(prompt: int = 1000, answer: int = 100) -> plt.Figure:
    """Blocks of 16 for samples of one prompt, with one answer each: as forks, and as separate sequences."""
    numbers, forks, alone = [1, 2, 4, 8, 16, 24, 32, 48, 64], list[int](), list[int]()
    prompt_rows, answer_rows = (np.zeros((count, 1, 1), np.float32) for count in (prompt, answer))
    for count in numbers:
        cache = PagedCache(PagedConfig(num_blocks=count * 70, **ONE))
        first = cache.create()
        cache.write(first, 0, 0, prompt_rows, prompt_rows)
        for sample in [first, *(cache.fork(first) for _ in range(count - 1))]:
            cache.write(sample, 0, prompt, answer_rows, answer_rows)
        forks.append(cache.pool.num_used)
        cache = PagedCache(PagedConfig(num_blocks=count * 70, **ONE))
        for _ in range(count):
            cache.ensure_capacity(cache.create(), prompt + answer)
        alone.append(cache.pool.num_used)
    figure, axes = plt.subplots(figsize=(7, 3.4))
    axes.plot(numbers, alone, color=ALONE, marker="o", markersize=3, label="separate sequences")
    axes.plot(numbers, forks, color=SHARED, marker="o", markersize=3, label="forks")
    axes.set(xlabel="samples of 100 tokens, for one prompt of 1000 tokens", ylabel="blocks of 16, one layer", ylim=(0, None))
    axes.legend()
    return figure


LENGTH, WIDTH = 256, 64


def draw_removal_errors() -> plt.Figure:
    """Error of attention after tokens were removed from the middle: mean of |out - never| / |never| over the queries."""
    rng, rotary = np.random.default_rng(4), Rotary(WIDTH, rotary_frequencies(WIDTH))
    plain, values = rng.normal(size=(2, LENGTH, 1, WIDTH)).astype(np.float32)
    wanted = plain[rng.integers(0, 64, size=100)] + 0.5 * rng.normal(size=(100, 1, WIDTH)).astype(np.float32)

    def rotate(rows: np.ndarray, first: int = 0) -> np.ndarray:  # for positions from `first` on
        return np.concatenate([rotary.turned(row[None], first + number) for number, row in enumerate(rows)])

    removed, errors = [1, 2, 4, 8, 16, 32, 64, 128], {"keys left unchanged": list[float](), "keys rotated back": list[float]()}
    for count in removed:
        start, stop = 64, 64 + count
        kept = np.r_[0:start, stop:LENGTH]
        query = np.concatenate([rotary.turned(row[None], LENGTH - count) for row in wanted])
        never = np.asarray(attention(query, rotate(plain[kept]), values[kept]), np.float64)
        for name, measured in errors.items():
            cache = PagedCache(PagedConfig(num_blocks=16, **ONE | {"head_dim": WIDTH}))
            sequence = cache.create()
            cache.write(sequence, 0, 0, rotate(plain), values)
            cache.remove(sequence, start, stop, **({"frequencies": rotary.frequencies} if "back" in name else {}))
            out = np.asarray(cache.attend(sequence, 0, query), np.float64)
            measured.append(float((np.linalg.norm(out - never, axis=-1) / np.linalg.norm(never, axis=-1)).mean()))
    figure, axes = plt.subplots(figsize=(7, 3.4))
    for (name, measured), colour in zip(errors.items(), (ALONE, SHARED), strict=True):
        axes.plot(removed, measured, color=colour, marker="o", markersize=3, label=name)
    axes.set(xscale="log", yscale="log", xlabel="tokens removed, of 256", ylabel="relative error of attention", ylim=(1e-8, 10))
    axes.set_xticks(removed, [str(count) for count in removed])
    axes.minorticks_off()
    axes.legend(loc="center right")
    return figure


USERS, TURNS, INSTRUCTIONS = 12, 6, 128


def draw_prefix_hit_rate() -> plt.Figure:
    """Share of the prompt tokens that are found, against the blocks of the pool. The requests are served in order."""
    pools, shares = [64, 96, 128, 192, 256, 320, 384, 448, 512, 640], list[float]()
    for num_blocks in pools:
        rng = np.random.default_rng(7)
        chats = [list(range(INSTRUCTIONS)) for _ in range(USERS)]
        cache, found, total = PrefixCache(PagedConfig(num_blocks=num_blocks, **ONE)), 0, 0
        for user in rng.permutation(np.repeat(np.arange(USERS), TURNS)):
            chats[user] += rng.integers(1000, 100_000, size=rng.integers(20, 60)).tolist()  # the user's question
            sequence = cache.begin(chats[user])
            hit = cache.length(sequence, 0)
            found, total = found + hit, total + len(chats[user])
            chats[user] += rng.integers(1000, 100_000, size=rng.integers(40, 100)).tolist()  # the model's answer
            rows = np.zeros((len(chats[user]) - hit, 1, 1), np.float32)
            cache.write(sequence, 0, hit, rows, rows)
            cache.commit(sequence, chats[user])
            cache.drop(sequence)
        shares.append(found / total)
    figure, axes = plt.subplots(figsize=(7, 3.4))
    axes.plot(pools, shares, color=SHARED, marker="o", markersize=3)
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.set(xlabel="blocks of 16 in the pool, one layer", ylabel="prompt tokens found", ylim=(0, 1))
    return figure
