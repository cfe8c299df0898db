"""The dashboard: `parley dashboard` runs it with the store's URL in `PARLEY_STORE`."""

import streamlit as st

__all__: list[str] = []

st.set_page_config(page_title="Parley", page_icon=":material/hub:", layout="wide")
st.navigation([st.Page("pages/rounds.py", title="Rounds", icon=":material/monitoring:", default=True)]).run()
