"""Classes of the components."""

from dovetail import PolicyScheduler
from dovetail.core.interfaces import CostModel, Observer, Router, TimedRequest, Workload


class FirstScheduler(PolicyScheduler):
    def order(self, waiting, ctx):
        return sorted(waiting, key=lambda seq: -len(seq.request.prompt_ids))


class FirstRouter(Router):
    def route(self, arrival, loads):
        return min(loads, key=lambda load: (load.samples, load.replica)).replica


class FirstCost(CostModel):
    def step_seconds(self, rows):
        return sum(1e-5 * row.tokens * row.times for row in rows)


class FirstObserver(Observer):
    def step(self, record):
        print(f"first observer: step {record.step}, {record.rows} rows, {record.tokens} tokens", flush=True)


class FirstWorkload(Workload):
    def requests(self, ctx):
        return [TimedRequest(prompt_ids=(1, 2, 3 + i), output_tokens=2) for i in range(self.config.most)]


class Changed:
    """Class of a component whose contract has a later version: it is refused before this is imported."""
