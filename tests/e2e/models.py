"""Tiny models from `transformers`, and batches for them: every architecture the tests go through.

Two layers each (GPT-2, which is quick, has one), the default attention (sdpa), and dropout wherever
the configuration has it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import transformers as hf
from torch import Tensor, nn

VOCABULARY = 96
BATCH, SEQUENCE = 2, 12
IMAGE, CLASSES = 16, 5

Inputs = Mapping[str, Tensor]


def next_token(generator: torch.Generator) -> Inputs:
    """For a model that predicts each token from those before it."""
    ids = _tokens(generator)
    return {"input_ids": ids, "labels": ids}


def masked_token(generator: torch.Generator) -> Inputs:
    """For a model that fills gaps; the second sequence is shorter, so that there is a mask."""
    mask = torch.ones(BATCH, SEQUENCE, dtype=torch.int64)
    mask[1, SEQUENCE - 3 :] = 0
    return {"input_ids": _tokens(generator), "attention_mask": mask, "labels": _tokens(generator)}


def translation(generator: torch.Generator) -> Inputs:
    """For an encoder and a decoder; what goes in and what comes out differ in length."""
    return {"input_ids": _tokens(generator), "labels": _tokens(generator)[:, :6].contiguous()}


def pictures(generator: torch.Generator) -> Inputs:
    return {
        "pixel_values": torch.randn(BATCH, 3, IMAGE, IMAGE, generator=generator),
        "labels": torch.randint(CLASSES, (BATCH,), generator=generator),
    }


def segmented(generator: torch.Generator) -> Inputs:
    """Pictures, of which each place is of a class."""
    return {
        "pixel_values": torch.randn(BATCH, 3, IMAGE, IMAGE, generator=generator),
        "labels": torch.randint(CLASSES, (BATCH, IMAGE, IMAGE), generator=generator),
    }


def _tokens(generator: torch.Generator) -> Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, SEQUENCE), generator=generator)


@dataclass(frozen=True)
class Case:
    """A model to train.

    build   with random values, from torch's global generator
    inputs  of one call; the output has a `loss`
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[torch.Generator], Inputs]


WIDTHS = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
"""Fields that most configurations spell alike."""
LAYERS_OF_TWO_KINDS = ["sliding_attention", "full_attention"]
CAUSAL = {**WIDTHS, "num_key_value_heads": 1, "max_position_embeddings": 32, "use_cache": False}


def gpt2() -> nn.Module:
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=32,
            n_embd=32,
            n_layer=1,
            n_head=2,
            use_cache=False,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def llama() -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**CAUSAL))


def qwen3() -> nn.Module:
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**CAUSAL, head_dim=16))


def mixtral() -> nn.Module:
    return hf.MixtralForCausalLM(
        hf.MixtralConfig(
            **CAUSAL,
            num_local_experts=4,
            num_experts_per_tok=2,
            output_router_logits=True,
        )
    )


def t5() -> nn.Module:
    return hf.T5ForConditionalGeneration(
        hf.T5Config(
            vocab_size=VOCABULARY,
            d_model=32,
            d_kv=16,
            d_ff=64,
            num_layers=2,
            num_heads=2,
            use_cache=False,
            decoder_start_token_id=0,
        )
    )


def bert() -> nn.Module:
    return hf.BertForMaskedLM(hf.BertConfig(**WIDTHS, max_position_embeddings=32))


def vit() -> nn.Module:
    return hf.ViTForImageClassification(
        hf.ViTConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=IMAGE,
            patch_size=8,
            num_labels=CLASSES,
            hidden_dropout_prob=0.1,
            attention_probs_dropout_prob=0.1,
        )
    )


def mamba(parallel_scan: bool = False) -> nn.Module:
    """parallel_scan: its default; the model's code then takes another formula when compiled"""
    return hf.MambaForCausalLM(
        hf.MambaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=2,
            state_size=8,
            use_cache=False,
            use_associative_scan=parallel_scan,
        )
    )


def gemma3() -> nn.Module:
    """One layer sees few tokens, the other all."""
    config = hf.Gemma3TextConfig(
        **CAUSAL, head_dim=16, sliding_window=4, layer_types=LAYERS_OF_TWO_KINDS
    )
    return hf.Gemma3ForCausalLM(config)


def gpt_oss() -> nn.Module:
    return hf.GptOssForCausalLM(
        hf.GptOssConfig(
            **CAUSAL,
            head_dim=16,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=4,
            layer_types=LAYERS_OF_TWO_KINDS,
        )
    )


def deepseek_v3() -> nn.Module:
    """Attention whose keys and values are compressed; experts in groups, beside a shared one."""
    return hf.DeepseekV3ForCausalLM(
        hf.DeepseekV3Config(
            **{**CAUSAL, "num_key_value_heads": 2},
            moe_intermediate_size=16,
            n_routed_experts=4,
            n_shared_experts=1,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            kv_lora_rank=8,
            q_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=16,
        )
    )


def qwen3_moe() -> nn.Module:
    return hf.Qwen3MoeForCausalLM(
        hf.Qwen3MoeConfig(
            **CAUSAL,
            head_dim=16,
            moe_intermediate_size=16,
            num_experts=4,
            num_experts_per_tok=2,
            output_router_logits=True,
        )
    )


def mamba2() -> nn.Module:
    return hf.Mamba2ForCausalLM(
        hf.Mamba2Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=2,
            state_size=8,
            num_heads=4,
            head_dim=16,
            n_groups=2,
            chunk_size=4,
            use_cache=False,
        )
    )


def segformer() -> nn.Module:
    """Its logits, which nobody differentiates, lie in memory in another format than their gradient
    from the loss."""
    config = hf.SegformerConfig(
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[16, 24],
        num_attention_heads=[1, 2],
        patch_sizes=[7, 3],
        strides=[4, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=16,
        num_labels=CLASSES,
    )
    return hf.SegformerForSemanticSegmentation(config)


CASES = {
    "gpt2": Case(gpt2, next_token),
    "llama": Case(llama, next_token),
    "qwen3": Case(qwen3, next_token),
    "mixtral": Case(mixtral, next_token),
    "t5": Case(t5, translation),
    "bert": Case(bert, masked_token),
    "vit": Case(vit, pictures),
    "mamba": Case(mamba, next_token),
    "mamba2": Case(mamba2, next_token),
    "gemma3": Case(gemma3, masked_token),
    "gpt-oss": Case(gpt_oss, next_token),
    "deepseek v3": Case(deepseek_v3, next_token),
    "qwen3 moe": Case(qwen3_moe, next_token),
    "segformer": Case(segformer, segmented),
}
