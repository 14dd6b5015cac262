"""A rank other than the first, which shows what it holds: its tables of slots, and the KV of slots."""

from __future__ import annotations

import numpy as np
import torch

from radixrt.ranks import follower
from radixrt.workers.channel import Message


class WatchedFollower(follower.Follower):
    """Answers {"look": [D, H]}, with D slots of the device's pool and then H of the host's, by "looked": the table
    on the host and the one on the device, then the KV of these slots, as words of float32.
    """

    def handle(self, message: Message) -> Message | None:
        if "look" not in message.body:
            return super().handle(message)
        (count, _), slots = message.body["look"], torch.from_numpy(message.numbers.copy())
        parts = self._parts
        tables = parts.rows.req_to_token, parts.runner.executor.req_to_token.numpy()
        kv = [parts.kv_pool.memory["kv"][:, :, slots[:count]]]
        if parts.host_pool is not None:
            kv.append(parts.host_pool.memory["kv"][:, :, slots[count:]])
        words = [np.ascontiguousarray(each.numpy()).view(np.int32) for each in kv]
        shown = [*tables, *words]
        told = {"looked": [[*each.shape] for each in shown]}
        return Message(told, np.concatenate([each.reshape(-1) for each in shown]))


if __name__ == "__main__":
    follower.Follower = WatchedFollower  # type: ignore[misc]
    follower.main()
