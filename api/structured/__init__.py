"""What a client wants its answer to look like, as the one formal description that the engine takes.

    response_format, structured_outputs, guided_* -> fields ----+
    StructuredOutputsParams of the library -> params -----------+-> StructuredOutput
    tools that must be called (`api.tools.binding`) -> lark ----+

Pure. What is broken, or too much to compile, is found here, before anything is sent.
"""
