"""The gateway: OpenAI's API for users' agents, in each rollout worker of a run with `task.agent` or
`gateway.enabled`, and in `asyncrl serve`.

server.py         routes, keys, limits: HTTP on loopback; the environment in which an agent plays
agent_session.py  one trajectory that an agent plays: requests are matched to contexts
openai_api.py     reads requests, writes answers
admin_routes.py   weights from another trainer; pause and resume
async_rl_routes.py  the routes of AsyncRL's recipe, for `asyncrl serve`
"""
