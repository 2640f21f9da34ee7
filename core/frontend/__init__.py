"""Front-ends of engines: open requests, their text, and the threads and processes in which engines run.

    caller ── submit ──► RequestTable ── Add, Abort, Finish, Control ──► EngineLoop: steps one engine
    caller ◄─ deltas ─── text, stop strings ◄──── StepMessage, Reply ───┘

    LLM, benchmarks: Engines    LocalEngine: the loop in a thread of this process, over a queue (engine.dp=1)
                                EngineProcess: a process per engine, over sockets (zmq_link)
    server: Fleet, EngineClient EngineProcess; an asyncio front, with restarts (supervised) or shared (attached)

The loop handles tokens only. Text is made in the front-end process, in the thread that receives from the engine.
"""
