"""One job, from requests to answers: render, plan, dispatch, store."""
