"""Tiny local models under the names of the hub models that PEFT's and transformers' tests load.

They lie in the layout of the hub's cache, so the tests find them by name, offline, without being changed.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from support import tiny_models
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

#: name on the hub -> model type of the stand-in
MODELS = {
    "EleutherAI/pythia-160m-deduped": "gpt_neox",
    "HuggingFaceTB/SmolLM2-135M-Instruct": "llama",
    "Qwen/Qwen2.5-0.5B-Instruct": "qwen2",
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": "llama",
    "distilbert/distilgpt2": "gpt2",
    "facebook/opt-125m": "opt",
    "facebook/opt-350m": "opt",
    "hf-internal-testing/Mixtral-tiny": "mixtral",
    "hf-internal-testing/tiny-random-Gemma3ForCausalLM": "gemma3_text",
    "hf-internal-testing/tiny-random-LlamaForCausalLM": "llama",
    "hf-internal-testing/tiny-random-MistralForCausalLM": "mistral",
    "hf-internal-testing/tiny-random-OPTForCausalLM": "opt",
    "hf-internal-testing/tiny-random-bart": "bart",
    "hf-internal-testing/tiny-random-bert": "bert",
    "hf-internal-testing/tiny-random-gpt2": "gpt2",
    "openai-community/gpt2": "gpt2",
    "peft-internal-testing/opt-125m": "opt",
    "peft-internal-testing/tiny-dummy-qwen2": "qwen2",
    "peft-internal-testing/tiny-random-BloomForCausalLM": "bloom",
    "peft-internal-testing/tiny-random-GPT2LMHeadModel": "gpt2",
    "peft-internal-testing/tiny-random-GPTJForCausalLM": "gptj",
    "peft-internal-testing/tiny-random-LlamaForCausalLM": "llama",
    "peft-internal-testing/tiny-random-OPTForCausalLM": "opt",
    "peft-internal-testing/tiny-random-gpt2": "gpt2",
    "trl-internal-testing/tiny-GptOssForCausalLM": "gpt_oss",
    "trl-internal-testing/tiny-Llama4ForCausalLM": "llama4_text",
    "trl-internal-testing/tiny-Qwen2ForCausalLM-2.5": "qwen2",
    "trl-internal-testing/tiny-Qwen3ForCausalLM": "qwen3",
    "trl-internal-testing/tiny-Qwen3MoeForCausalLM": "qwen3_moe",
    "trl-internal-testing/tiny-random-LlamaForCausalLM": "llama",
}
VOCABULARY = 1024  # the tests' own token ids go up to a few hundred
#: Of what makes them: stand-ins that an earlier version wrote are made anew.
_REVISION = hashlib.sha1(Path(__file__).read_bytes()).hexdigest()
_CHAT = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"


def make_cache(folder: Path) -> Path:
    """Write every stand-in below ``folder``, a hub cache, unless it is there; returns ``folder``."""
    for name, model_type in MODELS.items():
        repository = folder / f"models--{name.replace('/', '--')}"
        main = repository / "refs" / "main"
        if main.exists() and main.read_text() == _REVISION:
            continue
        snapshot = repository / "snapshots" / _REVISION
        build(model_type).save_pretrained(snapshot)
        tokenizer().save_pretrained(snapshot)
        main.parent.mkdir(exist_ok=True)
        main.write_text(_REVISION)  # last: says that the rest is complete
    return folder


def build(model_type: str) -> torch.nn.Module:
    """A tiny model with the library's own initialisation, as the hub's tiny models have, seed 0."""
    config = tiny_models.tiny_config(model_type)
    config.vocab_size = VOCABULARY
    torch.manual_seed(0)
    return tiny_models.model_class(model_type)(config).eval()


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a character: special tokens, then printable ASCII."""
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    tokens = [*special, "\n", *map(chr, range(32, 127))]
    model = models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>")
    characters = Tokenizer(model)
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=_CHAT,
    )
