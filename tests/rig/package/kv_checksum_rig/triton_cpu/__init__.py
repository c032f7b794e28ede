"""Register a Triton backend named "cpu", which compiles nothing.

vLLM uses Triton on a CPU platform only if a backend of that name is registered. With TRITON_INTERPRET=1
the interpreter runs the kernels, so neither the compiler nor the driver below is ever asked for anything.
"""
