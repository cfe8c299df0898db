"""The Streamlit dashboard: pure reads of the store, drawn."""
