"""Writes a GGUF model in another weight type with llama.cpp's quantiser: requantise.py MODEL OUT TYPE."""

import sys

import llama_cpp

source, target, kind = sys.argv[1:4]
parameters = llama_cpp.llama_model_quantize_default_params()
parameters.ftype = getattr(llama_cpp, "LLAMA_FTYPE_MOSTLY_" + kind)
parameters.allow_requantize = True
parameters.pure = kind != "F16"
code = llama_cpp.llama_model_quantize(source.encode(), target.encode(), parameters)
if code:
    sys.exit(f"llama_model_quantize failed with {code}")
