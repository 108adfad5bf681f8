"""Predictions beside published training runs: `python -m tests.benchmarks.published FILE.csv`.

Each run's own split is priced by the project's cost model and simulated by its schedules; nothing is run.
What was published is how a stack of its own ran, with its own habits (`stack`): those are constants of that
stack and not of autopar.

runs         the file: splits, shapes, seconds, what ran out of memory
llama        a Llama of a row's shape, on the meta device
pieces       its embedding, a block and its head, priced once for each size of micro-batch and split
stack        how the published stack runs them: cuts into stages, memory, sums of gradients, hosts
prediction   seconds and bytes of a run
fitting      the stack's constants, fitted to runs within bounds
baselines    an alpha-beta model without a fit, and one with eleven fitted parameters
mixtures     mixtures of experts: `python -m tests.benchmarks.published.mixtures FILE.csv`
unlike_trials   trials of unlike devices: `python -m tests.benchmarks.published.unlike_trials FILE.csv`
opt          an OPT in float32 with attention in plain products, on the meta device
sailor_plans   plans on GPUs: `python -m tests.benchmarks.published.sailor_plans FILE.csv`
long_sequences   splits of long sequences: `python -m tests.benchmarks.published.long_sequences FILE.csv`
score        rank correlation, regret, errors, out-of-memory
"""
