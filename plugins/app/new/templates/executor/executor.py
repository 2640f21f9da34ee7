"""One rank in this process. SlotLedger refuses invalid plans before a kernel runs."""

from dovetail.core.interfaces import Executor
from dovetail.core.parallel.slot_ledger import SlotLedger
from dovetail.core.worker.loader import load_rank


class Mine(Executor):
    pending = 0

    def __init__(self, config, composition):
        self.config, self.composition, self.runner, self.ledger = config, composition, None, SlotLedger()

    def start(self, progress):
        self.runner = (rank := load_rank(self.composition, progress)).bind(rank.info.num_pages)
        return rank.info

    def submit(self, plan, blobs):
        self.ledger.apply(plan)
        if self.config.log:
            print(f"step {plan.step}: {plan.num_tokens} tokens", flush=True)
        self.runner.execute(plan, blobs)
        self.pending += 1

    def complete(self, late):
        self.ledger.complete(late)
        self.runner.complete(late)

    def drafted(self):
        return self.ledger.check_drafted() or self.runner.drafted()

    def collect(self):
        self.ledger.check_collect(self.pending)
        self.pending -= 1
        return self.runner.collect()

    def shutdown(self):
        self.pending = 0
        if self.runner is not None:
            self.runner.close()
