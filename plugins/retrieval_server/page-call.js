"use strict";

// What both pages share: their elements and sentences, and requests with the API key.

const KEY = "retrieval-key"; // name in sessionStorage, which the browser deletes with the tab

const byId = (id) => document.getElementById(id);

function element(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

function show(sentence, isError) {
  byId("error").hidden = !isError;
  byId("error").textContent = isError ? sentence : "";
  byId("status").textContent = isError ? "" : sentence;
}

function authorisation() {
  const key = sessionStorage.getItem(KEY);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function call(path, request = {}) {
  let response;
  try {
    response = await fetch(path, { ...request, headers: { ...request.headers, ...authorisation() } });
  } catch {
    throw new Error("The server cannot be reached. Is it still running?");
  }
  if (response.ok) return response;
  const answer = await response.json().catch(() => ({}));
  const fault = new Error(answer.detail || `The server answered with status ${response.status}.`);
  fault.status = response.status;
  throw fault;
}
