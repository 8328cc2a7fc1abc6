"""The gateway: OpenAI's API for users' agents, in each rollout worker of a run with `task.agent`.

server.py            routes, keys, limits: HTTP on loopback
session.py           one trajectory: requests are matched to contexts, tokens recorded
agent_episodes.py    episodes that an agent plays, as the group runner sees them
openai_requests.py   reads requests;  openai_answers.py  writes answers
admin_routes.py      weights from another trainer; pause and resume
"""
