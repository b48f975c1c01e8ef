"""Imports of the server that forks test processes, so that each starts in milliseconds."""
# ruff: noqa: F401

import gc

import torch
import transformers
import transformers.models.auto.modeling_auto
import transformers.models.gpt2.modeling_gpt2

import megacore.convert.export
import megacore.corpus.collect
import megacore.data.build
import megacore.data.index_maps
import megacore.engine.build
import megacore.observe.recorder
import megacore.ranks.pretrain
import megacore.ranks.process
import megacore.ranks.stages
import megacore.tokenizer.build
import megacore.tokenizer.tokenize
import megacore.train.loop
import tests.convert._tiny
import tests.train._runs

torch.set_num_threads(1)
# torch prepares its optimizers' and distributed parts when they are first used.
torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])
assert transformers.GPT2LMHeadModel
gc.freeze()  # a collection of a rank need not look through what is imported here
