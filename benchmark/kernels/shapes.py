"""Workloads of the kernel benchmarks: decodes (and prefill chunks) over prefix forests.

A forest is written as in FastTree's and PAT's artifacts: "1,16,64 1024,256,32" has one
root of 1024 tokens, 16 nodes of 256 tokens below it, and 64 requests with 32 tokens of
their own. The last level are always the requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Shape:
    """A workload. ``counts[i]`` nodes on level ``i`` have ``tokens[i]`` tokens each."""

    family: str
    counts: tuple[int, ...]
    tokens: tuple[int, ...]
    label: str = ""
    ragged: bool = False  # own tokens vary from a quarter to seven quarters
    chunks: int = 0  # prefill chunks with the decodes, below the deepest nodes
    chunk_tokens: int = 0  # query tokens of each

    @property
    def name(self) -> str:
        """Unique among all shapes."""
        forest = f"{_join(self.counts)} {_join(self.tokens)}"
        return f"{self.label}: {forest}" if self.label else forest

    @property
    def num_decodes(self) -> int:
        return self.counts[-1]

    @property
    def sharing(self) -> float:
        """Requests below each of the deepest nodes. 1 if nothing is shared."""
        return self.counts[-1] / self.counts[-2] if len(self.counts) > 1 else 1.0

    def scaled_down(self) -> Shape:
        """The same kind of forest, small enough for a reference on a CPU."""
        counts = [
            min(count, 2 ** (level + 1), 24) for level, count in enumerate(self.counts)
        ]
        return Shape(
            self.family,
            tuple(counts),
            tuple(min(tokens, 20 + tokens % 31) for tokens in self.tokens),
            f"small {self.label}".strip(),
            self.ragged,
            min(self.chunks, 2),
            min(self.chunk_tokens, 19),
        )


def _join(values: tuple[int, ...]) -> str:
    return ",".join(map(str, values))


def parse_shape(family: str, forest: str, label: str = "") -> Shape:
    """A shape from its text form.

    Raises:
        ValueError: if the two lists differ in length or a level has fewer nodes than
            the one above it.
    """
    counts, tokens = (tuple(map(int, part.split(","))) for part in forest.split())
    if len(counts) != len(tokens) or list(counts) != sorted(counts):
        raise ValueError(
            f'"{forest}" is no forest: write as many numbers of tokens as of nodes, '
            "and no fewer nodes than on the level above"
        )
    return Shape(family, counts, tokens, label)


# Steps of offline batches (ours): many requests per prompt of 2,000 and of 16,000
# tokens, MMLU-like few-shot prompts, and one system prompt for all.
PERFORMANCE = {
    "sd16": "16,256 2000,250",
    "sd4": "64,256 2000,250",
    "sd16, long answers": "16,256 2000,1050",
    "sd16, long prompts": "16,256 16000,250",
    "sd3": "85,255 1570,60",
    "few-shot": "57,513 695,110",
    "system prompt": "1,1024 2048,32",
    "long system prompt": "1,256 32768,256",
    "few": "1,10 4000,400",
}

# BatchLLM sweeps prefix length, own length and sharing degree. The values are ours.
BATCHLLM_REQUESTS = 256
BATCHLLM_PREFIX = (500, 2000, 8000)
BATCHLLM_OWN = (100, 500)
BATCHLLM_SHARING = (2, 16)

# From FastTree's artifact (kernel_bench). The last one is ours.
FASTTREE = (
    "1,2,64 8,256,32",
    "1,4,256 8,256,32",
    "1,4,8,256 8,256,256,32",
    "1,256 256,32",
    "1,1024 2048,32",
    "1,16,64 1024,256,32",
    "1,4,16,512 1024,256,128,32",
    "1,4,16,64,256,1024 256,8,256,64,32,256",
    "1,10 4000,400",
    "1,2,4,8,16,32,64,128,1024 16,16,16,16,16,16,16,16,16",
    "1,2,4,8,16,32,64,128,1024 256,128,64,16,16,16,16,16,16",
    "1,8,16,32,64,128,1024 256,128,64,16,16,16,16",
    "1,8,16,32,64,256,1024 256,128,64,16,16,16,16",
    "1,16,32,64,128,1024 256,128,64,16,16,16",
    "1,16,32,64,256,1024 256,128,64,16,16,16",
    "1,8,64,256 512,1024,256,128",
)

# From PAT's artifact (benchmark). The last two share nothing.
PAT = (
    "1,10 4096,416",
    "1,256 256,32",
    "1,1024 2048,32",
    "1,2,64 1024,256,256",
    "1,4,256 32,256,32",
    "1,8,512 32,512,256",
    "1,8,512 32,2048,256",
    "1,8,512 512,512,256",
    "1,4,8,256 32,256,256,32",
    "1,4,16,512 1024,256,128,32",
    "1,4,16,64,256,1024 256,32,256,64,32,256",
    "1,16,32,64,128,1024 256,128,64,32,32,32",
    "1,16,32,64,256,1024 256,128,64,32,32,32",
    "1,8,16,32,64,128,1024 256,128,64,32,32,32,32",
    "1,8,16,32,64,256,1024 256,128,64,32,32,32,32",
    "2,8,16,256 256,256,32,32",
    "4,16,256,512 512,32,128,32",
    "8,16,32,256 512,512,256,32",
    "256 1024",
    "256 4096",
)

# More without sharing, ours: few long, many short, and ragged lengths.
UNSHARED = ("8 16384", "512 300")

FAMILIES = ("performance", "batchllm", "fasttree", "pat", "unshared", "mixed")
QUICK = ("sd16: 16,256 2000,250", "1,16,64 1024,256,32", "256 1024")


def all_shapes() -> list[Shape]:
    """Every shape, family by family. A forest can be in two families."""
    shapes = [parse_shape("performance", f, label) for label, f in PERFORMANCE.items()]
    for prefix in BATCHLLM_PREFIX:
        for own in BATCHLLM_OWN:
            for sharing in BATCHLLM_SHARING:
                counts = (BATCHLLM_REQUESTS // sharing, BATCHLLM_REQUESTS)
                shapes.append(Shape("batchllm", counts, (prefix, own)))
    shapes += [parse_shape("fasttree", forest) for forest in FASTTREE]
    shapes += [parse_shape("pat", forest) for forest in PAT]
    shapes += [parse_shape("unshared", forest) for forest in UNSHARED]
    shapes.append(Shape("unshared", (256,), (1000,), "ragged", ragged=True))
    # Ours: a step with seven prefill chunks and the decodes.
    for label, groups in (("7 chunks, sd16", 16), ("7 chunks, sd4", 64)):
        shapes.append(
            Shape(
                "mixed", (groups, 256), (2000, 250), label, chunks=7, chunk_tokens=256
            )
        )
    return shapes


def quick_shapes() -> list[Shape]:
    """A few, one of each kind."""
    shapes = [shape for shape in all_shapes() if shape.name in QUICK]
    return shapes + [shape for shape in all_shapes() if shape.chunks][:1]


@dataclass(frozen=True, slots=True)
class Layout:
    """A shape as the planner's arrays and a page table.

    Only whole pages are shared: nodes end at a multiple of the page size, and the rest
    is each request's own. Pages are scattered in the cache, in random order. Decodes
    come first, chunks after them.
    """

    shape: Shape
    page_size: int
    q_len: np.ndarray  # int32 [num_requests]
    kv_len: np.ndarray  # int32 [num_requests]
    table_row: np.ndarray  # int32 [num_requests]
    node_parent: np.ndarray  # int32 [num_nodes]
    node_end: np.ndarray  # int32 [num_nodes]
    request_node: np.ndarray  # int32 [num_requests]
    table: np.ndarray  # int32 [num_requests, max_pages]
    page_order: np.ndarray  # int64 [num_pages]: pages node by node, then by request
    page_users: np.ndarray  # int64 [num_pages, 2]: first, end of requests, that order
    num_unique_tokens: int

    @property
    def num_tokens(self) -> int:
        return int(self.q_len.sum())

    @property
    def num_slots(self) -> int:
        return len(self.page_order) * self.page_size

    @property
    def pairs(self) -> int:
        """Pairs of a query token and a KV token that it sees."""
        q_len, kv_len = self.q_len.astype(np.int64), self.kv_len.astype(np.int64)
        return int((q_len * kv_len - q_len * (q_len - 1) // 2).sum())

    def batch(self, first: int = 0, end: int | None = None) -> tuple[np.ndarray, ...]:
        """Arguments of ``AttentionPlanner.plan``, for all or a range of requests."""
        part = slice(first, end)
        return (
            self.q_len[part], self.kv_len[part], self.table_row[part],
            self.node_parent, self.node_end, self.request_node[part],
        )  # fmt: skip


def lay_out(shape: Shape, page_size: int, seed: int = 0) -> Layout:
    """Place a shape's KV in pages of ``page_size`` tokens."""
    random = np.random.default_rng(seed)
    parent, end, deepest = _nodes(shape, page_size)
    own = np.full(shape.num_decodes, shape.tokens[-1])
    if shape.ragged:
        spread = np.linspace(0.25, 1.75, shape.num_decodes)
        own = random.permutation((spread * shape.tokens[-1]).astype(np.int64))
    q_len = np.array([1] * shape.num_decodes + [shape.chunk_tokens] * shape.chunks)
    own = np.concatenate([own, np.full(shape.chunks, shape.chunk_tokens)])
    kv_len = sum(shape.tokens[:-1]) + own
    spread_out = np.arange(shape.chunks) * shape.num_decodes // max(1, shape.chunks)
    chunk_nodes = deepest[spread_out]
    request_node = np.concatenate([deepest, chunk_nodes])
    first_page = np.array([end[n] // page_size if n >= 0 else 0 for n in request_node])

    starts = np.array([end[p] if p >= 0 else 0 for p in parent], np.int64)
    node_pages = (np.asarray(end, np.int64) - starts) // page_size
    own_pages = -(-kv_len // page_size) - first_page
    bounds = np.concatenate([[0], np.cumsum(np.concatenate([node_pages, own_pages]))])
    page_order = random.permutation(int(bounds[-1]))
    table = np.zeros((len(q_len), int((first_page + own_pages).max())), np.int32)
    users = np.zeros((len(bounds) - 1, 2), np.int64)
    users[: len(parent), 0] = len(q_len)
    for i, node in enumerate(request_node):
        at = len(parent) + i
        users[at] = i, i + 1
        table[i, first_page[i] : first_page[i] + own_pages[i]] = page_order[
            bounds[at] : bounds[at + 1]
        ]
        while node >= 0:
            place = slice(starts[node] // page_size, end[node] // page_size)
            table[i, place] = page_order[bounds[node] : bounds[node + 1]]
            users[node] = min(users[node, 0], i), max(users[node, 1], i + 1)
            node = parent[node]
    unique = int(node_pages.sum()) * page_size
    unique += int((kv_len - first_page * page_size).sum())
    return Layout(
        shape=shape,
        page_size=page_size,
        q_len=q_len.astype(np.int32),
        kv_len=kv_len.astype(np.int32),
        table_row=np.arange(len(q_len), dtype=np.int32),
        node_parent=np.array(parent, np.int32),
        node_end=np.array(end, np.int32),
        request_node=request_node.astype(np.int32),
        table=table,
        page_order=page_order,
        page_users=np.repeat(users, np.diff(bounds), axis=0),
        num_unique_tokens=unique,
    )


def _nodes(shape: Shape, page_size: int) -> tuple[list[int], list[int], np.ndarray]:
    """Parents and ends of the nodes, and the deepest node of each decode."""
    parent: list[int] = []
    end: list[int] = []
    above = np.full(1, -1)  # nodes of the level above
    total = 0
    for count, tokens in zip(shape.counts[:-1], shape.tokens[:-1], strict=True):
        total += tokens
        parent += above[np.arange(count) * len(above) // count].tolist()
        above = np.arange(len(end), len(end) + count)
        end += [total // page_size * page_size] * count
    deepest = above[np.arange(shape.num_decodes) * len(above) // shape.num_decodes]
    return parent, end, deepest
