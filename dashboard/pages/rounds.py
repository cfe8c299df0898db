"""The rounds of one job: how far it is, how good the model is, and which site holds it back, and why."""

import time
from typing import Literal

import pandas as pd
import streamlit as st

from dashboard import charts, queries, reading, words
from federation.errors import ParleyError
from federation.messages import JobState

REFRESH_SECONDS = 2.0

COLOURS: dict[JobState, Literal["orange", "blue", "green", "red", "gray"]] = {
    JobState.WAITING: "orange",
    JobState.RUNNING: "blue",
    JobState.FINISHED: "green",
    JobState.FAILED: "red",
    JobState.STOPPED: "gray",
}


def pick(jobs: tuple[queries.JobChoice, ...]) -> queries.JobChoice:
    """The job that the reader chose; the newest at first."""
    title, chooser = st.columns([3, 2], vertical_alignment="bottom")
    title.title("Rounds", anchor=False)
    labels = {job.id: f"{job.id} · {job.state.value}" for job in jobs}
    chosen = chooser.selectbox("Job", list(labels), format_func=lambda job: labels[job])
    return next(job for job in jobs if job.id == chosen)


def show(job: queries.JobChoice) -> None:
    """The whole page on one job, as it stands now."""
    try:
        page = queries.page(reading.store(), job.id, time.time())
    except ParleyError as refused:
        refuse(refused)
        return
    if page is None:
        st.info(f"The job {words.plain(job.id)} is no longer in the store.")
        return
    if page.state is not job.state:
        st.rerun()  # the whole page: its list of jobs tells the state too, and a job that is over needs no refreshing
    head(page)
    headlines(page)
    held(page)
    sites(page)
    rounds(page)
    details(page)


def head(page: queries.JobPage) -> None:
    """Name, state and age of the job."""
    with st.container(horizontal=True, vertical_alignment="center"):
        st.subheader(words.plain(page.name), anchor=False, width="content")
        st.badge(page.state.value, color=COLOURS[page.state])
        st.caption(f"submitted {words.ago(time.time() - page.submitted)}", width="content")
    if page.reason:
        st.markdown(words.plain(page.reason))


def headlines(page: queries.JobPage) -> None:
    """The job in one row of numbers."""
    with st.container(horizontal=True):
        of = f" of {page.maximum}" if page.maximum else ""
        st.metric("Round", f"{page.round}{of}", border=True, height="stretch")
        for each in page.headlines:
            delta = None if each.change is None else words.change(each.change)
            colour: Literal["inverse", "normal"] = "inverse" if each.lower_is_better else "normal"
            label = words.plain(label_of(each.name))
            st.metric(label, words.number(each.value), delta, delta_color=colour, border=True, height="stretch")
        st.metric("Sites attending", f"{page.attending} of {len(page.sites)}", border=True, height="stretch")
        st.metric("Time", words.span(page.seconds), border=True, height="stretch")
        st.metric("Data moved", words.bytes_(page.bytes), border=True, height="stretch")


def label_of(metric: str) -> str:
    """A metric's name as a heading: short ones are abbreviations."""
    return metric.upper() if len(metric) <= 4 else metric.replace("_", " ").capitalize()  # noqa: PLR2004 - auc, rmse, mae


def held(page: queries.JobPage) -> None:
    """Which site holds the job back, and why: the first thing that an operator wants to know."""
    if page.silent:
        st.error(
            f"The coordinator has told nothing for {words.span(page.silent)}. Start it again: "
            "`parley coordinator serve`; the job goes on from its last round.",
            icon=":material/cloud_off:",
        )
    elif page.held_by:
        causes = "; ".join(f"**{words.plain(site.name)}**: {words.plain(site.trouble)}" for site in page.held_by)
        what = "The start" if page.state is JobState.WAITING else f"Round {page.round + 1}"
        st.warning(f"{what} is held back by {causes}", icon=":material/hourglass_top:")


def sites(page: queries.JobPage) -> None:
    """A row for each site; those that hold the job back come first and are marked."""
    st.subheader("Sites", anchor=False)
    table = pd.DataFrame(
        {
            "Site": [mark(site, f"**{words.plain(site.name)}**") for site in page.sites],
            "Organisation": [words.plain(site.organisation) for site in page.sites],
            "Attending": [":green[● yes]" if site.attending else ":red[○ no]" for site in page.sites],
            "Last seen": ["never" if site.last_seen is None else words.ago(site.last_seen) for site in page.sites],
            "Doing": [words.plain(site.doing or "-") for site in page.sites],
            "Working time": [words.span(site.seconds) for site in page.sites],
            "Data moved": [words.bytes_(site.bytes) for site in page.sites],
            "What holds it back": [trouble(site) for site in page.sites],
        }
    )
    st.table(table, border="horizontal", hide_index=True)


def mark(site: queries.SiteRow, text: str) -> str:
    """`text` with a sign before it where the site holds the job back."""
    return f":orange[:material/warning:] {text}" if site.holds_back else text


def trouble(site: queries.SiteRow) -> str:
    """What is wrong with a site, on a coloured ground where it holds the job back."""
    if not site.trouble:
        return "nothing"
    text = words.plain(site.trouble)
    return f":orange-background[{text}]" if site.holds_back else text


def rounds(page: queries.JobPage) -> None:
    """The two charts."""
    quality, time_spent = st.columns(2, gap="medium")
    with quality:
        st.subheader("Metrics per round", anchor=False)
        if page.headlines:
            figure = charts.metrics(page.rounds, page.headlines, page.best_round)
            st.plotly_chart(figure, config={"displayModeBar": False}, key="metrics")
        else:
            withheld = f"Metrics are {page.withheld}." if page.withheld else ""
            st.caption(withheld or "No round has been evaluated yet.")
    with time_spent:
        st.subheader("Seconds of work per round", anchor=False)
        if page.round:
            st.plotly_chart(charts.seconds(page.rounds), config={"displayModeBar": False}, key="seconds")
        else:
            st.caption("No round has been trained yet.")


def details(page: queries.JobPage) -> None:
    """The final model and the job file."""
    if page.model is not None:
        st.subheader("Final model", anchor=False)
        told = [f"{words.plain(each.name)} {words.number(each.value)}" for each in page.model.metrics]
        measured = ", ".join([*told, *filter(None, [page.withheld])])
        digest = page.model.payload.hex[:12]
        st.markdown(f"Round {page.model.round} · {measured} · {words.bytes_(page.model.payload.length)} · `{digest}`")
        st.code(f"parley model get {page.id}", language="shell")
    with st.expander("Job file", icon=":material/description:"):
        st.code(page.text, language="toml")


def refuse(refused: ParleyError) -> None:
    """What is wrong with the store, and the way out."""
    st.error(words.plain(refused.problem), icon=":material/database_off:")
    if refused.fix:
        st.markdown(f"To fix ({words.plain(refused.who.value)}): {words.plain(refused.fix)}")


def main() -> None:
    """The page; while the job goes on it draws itself anew every other second."""
    try:
        jobs = queries.choices(reading.store())
    except ParleyError as refused:
        st.title("Rounds", anchor=False)
        refuse(refused)
        return
    if not jobs:
        st.title("Rounds", anchor=False)
        st.info("No job has been submitted yet. Write one and hand it in:", icon=":material/inbox:")
        st.code("parley job new > job.toml\nparley job submit job.toml", language="shell")
        return
    job = pick(jobs)
    every = None if job.state.over else REFRESH_SECONDS
    st.fragment(show, run_every=every)(job)


main()
