"""All that ranks import, until the first step they compile has been planned: imported once, by the
process that they are forked from."""

import gc

import durable_ranks  # noqa: F401
import lean  # noqa: F401
import scipy.optimize  # noqa: F401
import torch._dynamo.dce_extra_outputs
import torch._dynamo.repro.after_aot
import torch._dynamo.repro.after_dynamo
import torch._dynamo.testing
import torch._export.passes._node_metadata_hook
import torch._higher_order_ops.passes.inline_invoke_subgraph
import torch._inductor.async_compile
import torch._inductor.compiler_bisector
import torch._inductor.debug
import torch._inductor.fx_utils
import torch._inductor.scheduler
import torch._inductor.sizevars
import torch._subclasses.schema_check_mode
import torch.distributed.tensor.experimental
import torch.export._trace
import torch.fx.experimental.validator
import torch.nn.attention.flex_attention

import zcompile.checkpoint.checkpoint
import zcompile.checkpoint.file
import zcompile.frontend.backend
import zcompile.frontend.movable
import zcompile.frontend.offload
import zcompile.frontend.optimizer_hooks
import zcompile.frontend.owners  # noqa: F401

torch._dynamo.list_backends(None)  # imports the module of each, as the first compilation does
gc.collect()
gc.freeze()
