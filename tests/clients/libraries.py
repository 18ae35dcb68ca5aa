"""Libraries that use language models: how to install each, and a short program that has it answer a question.

In each, BASE stands for the server's address with /v1, and the model is "scripted". A call of the tool is printed.
"""

SEMANTIC_KERNEL = """
import asyncio
from openai import AsyncOpenAI
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.functions import kernel_function

class Weather:
    @kernel_function(description="Weather of a city")
    def get_weather(self, city: str) -> str:
        print("called for", city)
        return "21 degrees"

async def main():
    client = AsyncOpenAI(base_url="BASE", api_key="none")
    service = OpenAIChatCompletion(ai_model_id="scripted", async_client=client)
    agent = ChatCompletionAgent(service=service, name="Helper", plugins=[Weather()])
    print(await agent.get_response(messages="How warm is Paris?"))

asyncio.run(main())
"""

GOOGLE_ADK = """
import asyncio
from google.adk.agents import Agent
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types

def get_weather(city: str) -> dict:
    '''Weather of a city.'''
    print("called for", city)
    return {"weather": "21 degrees"}

async def main():
    model = LiteLlm(model="openai/scripted", api_base="BASE", api_key="none")
    runner = InMemoryRunner(agent=Agent(name="helper", model=model, tools=[get_weather]), app_name="weather")
    session = await runner.session_service.create_session(app_name="weather", user_id="user")
    question = types.Content(role="user", parts=[types.Part(text="How warm is Paris?")])
    async for event in runner.run_async(user_id="user", session_id=session.id, new_message=question):
        for part in event.content.parts if event.content else []:
            print(part.text or "")

asyncio.run(main())
"""

CREWAI = """
from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool

@tool("get_weather")
def get_weather(city: str) -> str:
    '''Weather of a city.'''
    print("called for", city)
    return "21 degrees"

model = LLM(model="openai/scripted", base_url="BASE", api_key="none")
agent = Agent(role="helper", goal="help", backstory="none", tools=[get_weather], llm=model, verbose=False)
task = Task(description="How warm is Paris?", expected_output="a sentence", agent=agent)
print(Crew(agents=[agent], tasks=[task], verbose=False).kickoff())
"""

SMOLAGENTS = """
from smolagents import CodeAgent, OpenAIServerModel, tool

@tool
def get_weather(city: str) -> str:
    '''Weather of a city.

    Args:
        city: the city
    '''
    print("called for", city)
    return "21 degrees"

model = OpenAIServerModel(model_id="scripted", api_base="BASE", api_key="none")
print(CodeAgent(tools=[get_weather], model=model, max_steps=2, verbosity_level=0).run("How warm is Paris?"))
"""

# By the folders of their environments. smolagents calls its tools in code that the model writes.
PROGRAMS = {"semantic-kernel": SEMANTIC_KERNEL, "google-adk": GOOGLE_ADK, "crewai": CREWAI, "smolagents": SMOLAGENTS}
# Without telemetry, and without asking the network for the prices of models.
QUIET = {
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_TRACING_ENABLED": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OTEL_SDK_DISABLED": "true",
}
