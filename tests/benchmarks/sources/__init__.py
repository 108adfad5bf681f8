"""The figures of the sources, computed again: `python -m tests.benchmarks.sources`.

Each row has what is computed here, by formula, by counting, or by a plan, and beside it what was published,
where a number is known, with the reason where the two differ. Models stand on the meta device, and nothing is
run.

nets         AlexNet, VGG-16, ResNet-50 and a net of volumes, and the sizes of their layers
figures      a row and its table
integrated   batch, domain and model parallelism together, for AlexNet
projection   the pure strategies, for three nets
domain       a convolution split in space
server       a parameter server against a ring
products     products of a sparse matrix in 1, 1.5, 2 and 3 dims
peak         memory of ResNet-50 in half precision
loops        sums on a loop network against those on a fat tree
"""
