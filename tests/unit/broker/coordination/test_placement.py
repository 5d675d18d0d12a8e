"""Placement: offers of nodes, needs of workspaces, and the error when they do not match."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from broker.contract.specs import WorkspaceNeeds, WorkspaceSpec
from broker.coordination.placement import NodeOffer, Placement, has_needs

OFFER = NodeOffer(
    sandboxes=("bwrap", "docker"), images=("team/base:1", "team/*"), labels=("gpu",), memory_bytes=2**30, cpus=2.0
)


@pytest.mark.parametrize(
    ("workspace", "lacking"),
    [
        (WorkspaceSpec(), []),
        (WorkspaceSpec(sandbox="docker"), []),
        (WorkspaceSpec(sandbox="none"), ["the sandbox none"]),
        (WorkspaceSpec(sandbox="docker", image="team/other:2"), []),
        (WorkspaceSpec(sandbox="docker", image="other:2"), ["the image other:2"]),
        (WorkspaceSpec(needs=WorkspaceNeeds(labels=("gpu", "ssd"))), ["the label ssd"]),
        (WorkspaceSpec(needs=WorkspaceNeeds(memory_bytes=2**30, disk_bytes=2**50, cpus=2)), []),
        (WorkspaceSpec(needs=WorkspaceNeeds(memory_bytes=2**31, cpus=2.5)), ["2 GiB of memory", "2.5 CPUs"]),
    ],
)
def test_workspace_is_served_by_nodes_that_offer_its_needs(workspace: WorkspaceSpec, lacking: list[str]) -> None:
    assert OFFER.find_unmet_needs(workspace) == lacking


def test_a_workspace_without_needs_costs_no_look() -> None:
    assert not has_needs(WorkspaceSpec())
    assert has_needs(WorkspaceSpec(needs=WorkspaceNeeds()))
    assert has_needs(WorkspaceSpec(sandbox="docker"))


def test_what_is_said_where_nothing_fits_is_short() -> None:
    lacking = {f"node{number:03}": "lacks the label gpu" for number in range(100)}
    text = str(Placement((), lacking, has_workers=True).make_refusal())
    assert "node007 lacks the label gpu. 92 more nodes cannot serve it." in text
    assert len(text) < 1_000


def test_needs_are_bounded() -> None:
    for fields in ({"labels": ("a b",)}, {"labels": ("x",) * 17}, {"memory_bytes": 0}, {"cpus": float("nan")}):
        with pytest.raises(ValidationError):
            WorkspaceNeeds.model_validate(fields)
