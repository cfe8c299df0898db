"""The dashboard: `parley dashboard` runs it with the store's URL in `PARLEY_STORE`."""

import streamlit as st

__all__: list[str] = []

st.set_page_config(page_title="Parley", layout="wide")  # no icon: Streamlit would fetch it from the internet
st.html("<style>[data-testid='stMainBlockContainer'] { padding-top: 2.5rem; padding-bottom: 3rem; }</style>")
st.navigation([st.Page("pages/rounds.py", title="Rounds", icon=":material/monitoring:", default=True)]).run()
