"""Random actions on a world."""

from __future__ import annotations

import random

from radixrt.schedule.policy import SchedulePolicy
from tests.support.forms import RuleForm
from tests.support.world.invariants import is_extending
from tests.support.world.model import VOCAB, form_of
from tests.support.world.world import Sizes, World

PRIORITIES = (0, 0, 0, -1, 2)


class Walk:
    """Random actions on a world, all from one seed; `faults` multiplies how often something fails."""

    def __init__(self, world: World, seed: int, faults: int = 1) -> None:
        self.world = world
        self.faults = faults
        self.random, self.other, self.of_forms = (random.Random(seed) for _ in range(3))

    def prompt(self) -> list[int]:
        """Fresh, a repetition, or something that shares a prefix with an earlier answer or its answer."""
        r = self.random
        fresh = [r.randrange(VOCAB) for _ in range(r.randint(1, 14))]
        if not self.world.answers or r.random() < 0.25:
            return fresh
        there = self.world.on_host() if self.world.host_slots is not None and r.random() < 0.4 else []
        earlier = r.choice(there or self.world.answers[-12:]).tokens().tolist()
        if r.random() < 0.3:
            return earlier[:24]
        return (earlier[: r.randint(1, len(earlier))] + fresh)[:24]

    def family(self, prompt: list[int], count: int) -> list[list[int]]:
        """A prompt, so many times; or prompts that each begin with a part of the one before, or with all of it."""
        r = self.other
        if not self.world.sizes.families or r.random() < 0.5:
            return [prompt] * count
        out = [prompt]
        while len(out) < count + 2:
            known = out[-1][: r.choice([len(out[-1]), r.randint(1, len(out[-1]))])]
            out.append((known + [r.randrange(VOCAB) for _ in range(r.randint(1, 4))])[:24])
        return out

    def form(self) -> RuleForm | None:
        """For some requests, in a world of forms."""
        has_form = self.world.sizes.forms and self.of_forms.random() < 0.5
        return form_of(self.of_forms.randint(1, 9)) if has_form else None

    def act(self) -> None:
        world, r = self.world, self.random
        action = r.random()
        if action < 0.28:
            stop_ids = frozenset([r.randrange(VOCAB)]) if r.random() < 0.4 else frozenset()
            namespace = world.namespace(r.choice([None, None, None, "other"]))
            prompt = self.prompt()
            for own in self.family(prompt, r.choice([1, 1, 1, 3])):
                world.submit(
                    own,
                    r.randint(0, 12) or r.randint(0, 1),
                    stop_ids=stop_ids,
                    namespace=namespace,
                    scored_from=r.choice([None, None, None, 0, len(own) // 2, len(own) - 1]),
                    priority=self.other.choice(PRIORITIES),
                    form=self.form(),
                )
        elif action < 0.30:
            prompt, most, n = self.prompt(), r.randint(1, 8), r.randint(2, 5)
            world.submit(prompt, most, n=n, priority=self.other.choice(PRIORITIES), form=self.form())
        elif action < 0.32:
            forked = [q for q in world.answers[-12:] if q.known_len < 28]
            if forked:
                tails = [[t] * r.randint(1, 3) for t in r.sample(range(VOCAB), r.randint(2, 3))]
                world.fork(r.choice(forked), tails, r.randint(1, 8), n=r.choice([1, 1, 3]))
        elif action < 0.325:
            bump = r.random() < 0.7
            world.update_weights(bump=bump, flush=not bump or r.random() < 0.5)
        elif action < 0.33:
            world.save_cache()
        elif action < 0.34:
            if world.kept is not None:
                world.load_cache(fails=r.random() < 0.2)
        elif action < 0.40:
            if world.runner.transfers and r.random() < 0.5:
                world.runner.transfer_next()
            elif world.runner.queue and not world.runner.waits_for_masks(world.runner.queue[0]):
                world.runner.run_next()
        elif action < 0.45:
            alive = [q for q in world.answers if not q.finished]
            if alive:
                world.abort(r.choice(alive))
        elif action < 0.50:
            if world.scheduler.running:
                world.retract(r.choice(world.scheduler.running))
        elif action < 0.52:
            if world.host_slots is None or r.random() < 0.2:  # what is on the host has taken time to get there
                world.cache.flush()
        else:
            if r.random() < 0.03 * self.faults:
                world.fail_alloc = True
            fault = r.random() / self.faults
            # What a failed launch loses matters to requests that are not in its pass: those that sit it out.
            sits_out = sum(is_extending(q) for q in world.scheduler.running) > 1
            world.runner.fail_launch |= fault < (0.03 if sits_out else 0.01)
            if world.host_slots is not None and r.random() < 0.02 * self.faults:
                world.runner.fail_transfer = r.randint(0, 2)
            world.runner.fail_run |= 0.03 <= fault < 0.04
            world.runner.fail_draw |= world.sizes.forms and self.of_forms.random() / self.faults < 0.01
            world.runner.poison_next |= 0.04 <= fault < 0.06
            world.step()
        world.check()


def random_sizes(seed: int, host_slots: int = 0) -> Sizes:
    r = random.Random(seed)
    return Sizes(
        num_slots=r.choice([40, 48, 64, 120]),
        num_rows=r.choice([2, 4, 6]),
        max_running=r.choice([1, 3, 5]),
        chunk=r.choice([1, 3, 7, 32]),
        policy=r.choice(list(SchedulePolicy)),
        enabled=r.random() > 0.08,
        force_miss=r.random() < 0.08,
        max_samples=r.choice([0, 4, 8]),
        host_slots=host_slots,
        max_in_flight=1 if r.random() > 0.2 else 0,
        drops=True,
        max_ranked=r.choice([512, 512, 1, 2]),
    )
