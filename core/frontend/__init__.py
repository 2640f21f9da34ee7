"""The engine in a process of its own, and a client of it for asyncio. A front-end of any protocol builds on it.

    front-end process                                        engine process
    EngineClient.submit ─ Add, Abort, Finish, Control ─ zmq ─► step loop (one thread: engine, sockets)
    Stream ◄─ text, stop strings ◄─ output thread ◄─── zmq ── StepMessage: one message a step

The step loop handles tokens only. Text is made in the front-end's process, in a thread beside its event loop. Several
front-ends may use the same engines, each over links of its own; one process owns them: see `sharing`.
"""
