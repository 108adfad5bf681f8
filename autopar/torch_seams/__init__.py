"""What autopar uses of torch beyond its documented names: private, replaced, or other in each version.

Each name says why it is needed. Importing a module of this room fails in one line, which names the version of
torch, where a name isn't there in the form that is known. Other rooms use the public names here alone.

torch_version       the versions of torch that autopar knows
required            how a missing name is told
schemas             operators, and what their schemas say
pytree              nested arguments as lists of leaves
tensors             writes to tensors, and whose memory they have
modules             what nn.Module keeps in dictionaries
dtensors            local parts, how they lie, what operators do
fakes               tensors without values
modes               what sees each operator or function, and what is past it
autograd            the engine, its nodes, and hooks of what it saves
transforms          torch.func and torch.jit.trace
applied_functions   every call of a Function, by versions of torch
replaced            attributes in whose place others are put
tracing             what is done otherwise while a model is traced
optimizers          what looks at the gradients of a whole model
state_dicts         state dicts by names
wrappers            what shards or replicates a model
pipelining          stages and schedules, by public names
receive_buffers     what stages receive, by versions of torch
launching           the agent that starts and ends ranks
islands             process groups between ranks of different worlds
collectives         stores, and collectives by the names of each version
devices             what a device does beside
inductor            passes over graphs that are about to be compiled
"""
