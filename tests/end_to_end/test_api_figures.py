"""Evaluations and quotas over HTTP, read with the rights of a server, from any content of the store."""

from __future__ import annotations

import json

import pytest

from broker.coordination.membership import Membership
from broker.limits.governor import CallGranted, CallQueued, Governor
from broker.limits.quotas import QuotaTable
from broker.store.connection import MultiplexedConnection
from deckhands.evaluation.attempts.catalog import MAX_EVIDENCE_CHARS, Catalog
from deckhands.evaluation.attempts.results import AttemptRow
from tests.evaluation_parts import write_evaluation
from tests.server_parts import Served


def row(number: int, outcome: str = "resolved", **fields: object) -> AttemptRow:
    known: dict[str, object] = {"instance": f"i{number:03}", "model": "m", "attempt": 1, "outcome": outcome}
    known |= {"cost_usd": number / 100, "seconds": float(number), "conversation_id": f"conversation-{number}"}
    return AttemptRow.model_validate(known | fields)


async def test_tenant_sees_only_its_evaluations_with_figures_and_attempts(server: Served) -> None:
    store = server.client.store
    rows = [row(number) for number in range(6)]
    rows += [row(6, "limit", cause="max_iterations"), row(7, "unresolved", evidence="x" * 9_000, patch="secret")]
    rows[5] = row(5, critic_id="critic-5", critic_cost_usd=0.5, score=7.0, verdict="Fine.", lost_cost_usd=0.25)
    rows[3] = row(3, reward=0.5, metrics={"speed": 2.0}, step_rewards=[0.25])
    rows[4] = row(4, left_out=[f"{number}.pth" for number in range(1_000)])
    await write_evaluation(store, "theirs", [row(1, model="other")], tenant="other")
    await write_evaluation(store, "nobodys", [row(1)])
    await write_evaluation(store, "own-one", rows, tenant="acme", total=10)
    async with server.as_(await server.token()) as client:
        (listed,) = (await client.get("/evaluations")).json()
        assert (listed["name"], listed["tenant"], listed["total"], listed["ended"]) == ("own-one", "acme", 10, 8)
        assert listed["is_driven"] is True
        found = (await client.get("/evaluations/own-one")).json()
        assert found["outcomes"] == {"resolved": 6, "unresolved": 1, "limit": 1}
        (figures,) = found["figures"]
        assert (figures["model"], figures["attempts"], figures["pass_at_1"]) == ("m", 8, 0.75)
        assert (figures["critic_cost_usd"], figures["lost_cost_usd"]) == (0.5, 0.25)
        assert {one["value"]: sum(one["counts"]["m"]) for one in found["distributions"]} == {
            "cost_usd": 8,
            "seconds": 8,
        }
        assert [(one["outcome"], one["cause"], one["attempts"]) for one in found["failure_classes"]] == [
            ("limit", "max_iterations", {"m": 1}),
            ("unresolved", "", {"m": 1}),
        ]
        path = "/evaluations/own-one/attempts"
        first = (await client.get(f"{path}?limit=3")).json()
        assert ([one["instance"] for one in first["attempts"]], first["total"]) == (["i000", "i001", "i002"], 8)
        last = (await client.get(f"{path}?limit=300&after={first['next_after']}")).json()
        assert (len(last["attempts"]), last["next_after"]) == (5, None)
        names = ("critic_id", "critic_cost_usd", "score", "verdict", "lost_cost_usd")
        assert [last["attempts"][2][name] for name in names] == ["critic-5", 0.5, 7.0, "Fine.", 0.25]
        assert len(last["attempts"][1]["left_out"]) == 100
        rewards = ("reward", "metrics", "step_rewards")
        assert [last["attempts"][0][name] for name in rewards] == [0.5, {"speed": 2.0}, [0.25]]
        assert [last["attempts"][1][name] for name in rewards] == [None, {}, []]
        assert figures["reward"] == {
            "mean": 0.6875,
            "interval": pytest.approx([0.3046, 1.0704], abs=1e-4),
            "instances": 8,
        }
        assert figures["metrics"] == {"speed": {"mean": 2.0, "interval": None, "instances": 1}}
        (failed,) = (await client.get(f"{path}?outcome=limit&cause=max_iterations")).json()["attempts"]
        assert failed["conversation_id"] == "conversation-6"
        (unsolved,) = (await client.get(f"{path}?outcome=unresolved&cause=&instance=07")).json()["attempts"]
        assert len(unsolved["evidence"]) == MAX_EVIDENCE_CHARS
        assert "patch" not in unsolved
        for other in ("theirs", "nobodys", "missing", "own-one:rows", "..%2fown-one"):
            for suffix in ("", "/attempts"):
                answer = await client.get(f"/evaluations/{other}{suffix}")
                assert answer.status_code == 404, other
        assert (await client.get(f"{path}?outcome=nonsense")).status_code == 422
    async with server.as_(await server.token("*")) as client:
        assert {one["name"] for one in (await client.get("/evaluations")).json()} == {"theirs", "nobodys", "own-one"}


async def test_ten_thousand_attempts_are_read_once_and_shown_in_pages(server: Served) -> None:
    store, many = server.client.store, 10_000
    outcomes = ("resolved", "unresolved")
    rows = [row(number, outcomes[number % 2], evidence="x" * MAX_EVIDENCE_CHARS) for number in range(many)]
    await write_evaluation(store, "big-one", rows, tenant="acme", state="over")
    async with server.as_(await server.token()) as client:
        answer = await client.get("/evaluations/big-one", timeout=120)
        assert answer.json()["figures"][0]["attempts"] == many
        assert len(answer.content) < 10_000
        scans = await scans_of(server)
        path = "/evaluations/big-one/attempts"
        page = await client.get(f"{path}?outcome=unresolved&limit=50&after=4950")
        assert [one["instance"] for one in page.json()["attempts"]][-1] == "i9999"
        assert (page.json()["total"], page.json()["next_after"]) == (many // 2, None)
        assert len(page.content) < 50 * (MAX_EVIDENCE_CHARS + 1_000)
        assert (await client.get(f"{path}?limit=501")).status_code == 422
        assert (await client.get("/evaluations/big-one")).json() == answer.json()
        assert await scans_of(server) == scans
        await Catalog(store).put("big-one", [row(0, "unresolved", round=1)])
        again = (await client.get("/evaluations/big-one", timeout=120)).json()
        assert await scans_of(server) > scans
        assert again["figures"][0]["outcomes"] == {"resolved": many // 2 - 1, "unresolved": many // 2 + 1}


async def scans_of(server: Served) -> int:
    admin = MultiplexedConnection(server.log.admin)
    stats = (await admin.call("INFO", "commandstats")).decode()
    await admin.aclose()
    return int(stats.partition("cmdstat_hscan:calls=")[2].partition(",")[0] or 0)


async def test_foreign_values_in_the_store_are_omitted(server: Served) -> None:
    """A producer with rights to the store can write there; a list and a page do not break by it."""
    store, names = server.client.store, server.client.store.all_shards[0]
    await write_evaluation(store, "good-one", [row(1), row(2)], tenant="acme")
    fine = row(3).model_dump(mode="json")
    strange: dict[str | bytes, str | bytes] = {
        "no json": "{",
        json.dumps(["m", "i009", 1]): json.dumps(fine),  # under the name of another attempt
        json.dumps(["m", "i003", 1]): json.dumps(fine | {"seconds": 1e999}),
        "\udcff".encode(errors="surrogateescape"): b"\xff\xfe",
    }
    call = store.connection.call
    await call("HSET", names.evaluation_rows("good-one"), *[part for item in strange.items() for part in item])
    await call(
        "ZADD", names.evaluations, 5e14, "far-off", 7, "no-hash", 8, "bad:name", 9, "wrong-type", 10, "bad-about"
    )
    await call("SET", names.evaluation("wrong-type"), "x")
    await call("HSET", names.evaluation("far-off"), "about", "{}")
    await call("HSET", names.evaluation("bad-about"), "about", "[1]", "status", '{"state": 1}')
    await call("HSET", names.evaluation("good-one"), "status", '{"state": "over", "total": -1}')
    async with server.as_(await server.token("*")) as client:
        (listed,) = (await client.get("/evaluations")).json()
        assert (listed["name"], listed["state"], listed["is_driven"]) == ("good-one", "", False)
        found = (await client.get("/evaluations/good-one")).json()
        assert found["figures"][0]["attempts"] == 2
        assert (await client.get("/evaluations/wrong-type")).status_code == 404
    assert [one.instance for one in await Catalog(store).rows("good-one")] == ["i001", "i002"]


TABLE = QuotaTable.parse("""
[[quota]]
model = "openai/*"
concurrency = 1
requests_per_minute = 600
tokens_per_day = 1000
[[quota]]
model = "local"
requests_per_minute = 60
""")


async def test_quota_shows_remainder_waiters_and_binding_limit(server: Served) -> None:
    store = server.client.store
    names = "\n".join(pool.model for pool in TABLE.pools)
    worker = Membership(store, "controller-1", "controller", about={"quotas": f"{names}\nnobody-has-published-it"})
    await worker.register()
    governor = Governor(store, TABLE)
    await governor.publish()
    pool = TABLE.pools[0]
    outcomes = [
        await governor.reserve(pool, cid, "controller-1", input_tokens=100, output_tokens=50) for cid in ("one", "two")
    ]
    assert [type(each) for each in outcomes] == [CallGranted, CallQueued]
    async with server.as_(await server.token("*")) as client:
        found = {one["models"]: one for one in (await client.get("/quotas")).json()}
        assert found.keys() == {"openai/*", "local", "nobody-has-published-it"}
        (key,) = found["openai/*"]["keys"]
        assert (found["openai/*"]["waiting"], key["in_flight"], key["binds"]) == (1, 1, "calls at once")
        left = {one["name"]: one["left"] for one in key["limits"]}
        assert left.keys() == {"requests a minute", "tokens a day", "calls at once"}
        assert left["tokens a day"] == 850
        assert [one["binds"] for one in found["local"]["keys"]] == [""]
        assert found["nobody-has-published-it"]["keys"] == []
        base = store.all_shards[0].quota(pool.name)
        await store.connection.call("HSET", f"{base}:level:own", "requests", "x", "in_flight", "-9", "blocked", "1e400")
        await store.connection.call("SET", f"{store.all_shards[0].quota('local')}:level:own", "x")
        answer = await client.get("/quotas")
        assert answer.status_code == 200
        assert [one["models"] for one in answer.json()] == ["local", "nobody-has-published-it", "openai/*"]
    async with server.as_(await server.token("acme")) as client:
        assert (await client.get("/quotas")).status_code == 403
    await worker.leave()


async def test_administrator_sets_limits_of_a_quota(server: Served) -> None:
    store = server.client.store
    worker = Membership(store, "controller-1", "controller", about={"quotas": TABLE.pools[0].model})
    await worker.register()
    await Governor(store, TABLE).publish()
    path = "/quotas/openai%2F%2A"
    change = {"key": "own", "limits": {"concurrency": 3}, "reason": "the provider is slow"}
    async with server.as_(await server.token("*")) as client:
        tag = (await client.get(path)).headers["ETag"]
        answer = await client.put(path, json=change, headers={"If-Match": tag})
        assert answer.status_code == 200
        limits = {one["field"]: (one["limit"], one["published"]) for one in answer.json()["keys"][0]["limits"]}
        assert limits == {"requests": (600, 600), "day_tokens": (1000, 1000), "concurrency": (3, 1)}
        refused = await client.put(path, json=change, headers={"If-Match": tag})
        assert (refused.status_code, refused.json()["code"]) == (412, "precondition_failed")
        for limits, code in (({"output": 5}, "no_such_limit"), ({"concurrency": 0}, "usage")):
            refused = await client.put(path, json=change | {"limits": limits})
            assert (refused.status_code, refused.json()["code"]) == (422, code)
        assert (await client.put("/quotas/none", json=change)).json()["code"] == "unknown_quota"
        assert (await client.put(path, json=change | {"key": "other"})).json()["code"] == "unknown_quota"
        granted = [
            await Governor(store, TABLE).reserve(TABLE.pools[0], cid, "controller-1", input_tokens=1, output_tokens=1)
            for cid in ("one", "two", "three", "four")
        ]
        assert [isinstance(one, CallGranted) for one in granted] == [True, True, True, False]
        assert (await client.put(path, json=change | {"limits": {}})).json()["keys"][0]["set"] == ""
        done = [(one["action"], one["target"], one["reason"]) for one in (await client.get("/operations")).json()]
    assert ("quota.set", "openai/* own", "concurrency=3: the provider is slow") in done
    assert ("quota.set", "openai/* own", "as in the file: the provider is slow") in done
    assert not [reason for _, _, reason in done if "concurrency=0" in reason or "output=5" in reason]
    async with server.as_(await server.token("acme")) as client:
        assert (await client.put(path, json=change)).status_code == 403
    await worker.leave()


async def test_set_limits_of_a_removed_key_are_listed_and_removed(server: Served) -> None:
    store = server.client.store
    pool = TABLE.pools[0]
    worker = Membership(store, "controller-1", "controller", about={"quotas": pool.model})
    await worker.register()
    await Governor(store, TABLE).publish()
    path, change = "/quotas/openai%2F%2A", {"key": "own", "limits": {"concurrency": 3}, "reason": "a test"}
    async with server.as_(await server.token("*")) as client:
        assert (await client.put(path, json=change)).status_code == 200
        other = pool.model_copy(update={"quotas": (pool.quotas[0].model_copy(update={"key_env": "OTHER_KEY"}),)})
        await Governor(store, TABLE.model_copy(update={"pools": (other,)})).publish()
        keys = {one["name"]: one for one in (await client.get(path)).json()["keys"]}
        assert {name: (one["is_published"], one["set"]) for name, one in keys.items()} == {
            "OTHER_KEY": (True, ""),
            "own": (False, "concurrency=3"),
        }
        refused = await client.put(path, json=change)
        assert (refused.status_code, refused.json()["code"]) == (422, "no_such_limit")
        removed = await client.put(path, json=change | {"limits": {}})
        assert [one["name"] for one in removed.json()["keys"]] == ["OTHER_KEY"]
        assert await store.connection.call("HGETALL", f"{store.find_home(pool.name).quota(pool.name)}:set") == []
    await worker.leave()
