# Beside `examples/train.py`, examples that run as scripts import it by this name.
from examples.train import Task as Task
from examples.train import main as main
