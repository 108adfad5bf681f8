"""The agent of torch's elastic launcher, which starts and ends the ranks of a node."""

from __future__ import annotations

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from autopar.torch_seams.replaced import Replaceable
from autopar.torch_seams.required import expect_parameters

ending_ranks = Replaceable(LocalElasticAgent, "_shutdown")
"""The agent's end of its ranks, which waits for them for 30 seconds whatever the launcher says."""

expect_parameters(ending_ranks.now, "self", "death_sig", "timeout")
