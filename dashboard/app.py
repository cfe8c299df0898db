"""The dashboard: `parley dashboard` runs it with the store's URL in `PARLEY_STORE`."""

import streamlit as st

__all__: list[str] = []

st.set_page_config(page_title="Parley", layout="wide")
st.html("<style>[data-testid='stMainBlockContainer'] { padding-top: 2.5rem; padding-bottom: 3rem; }</style>")
# Neither the app nor a page has an icon: Streamlit would fetch it from the internet.
st.navigation([st.Page("pages/rounds.py", title="Rounds", default=True)]).run()
