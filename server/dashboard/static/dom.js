// Nodes from names, attributes and children. Whatever the service says becomes text, never markup.

export const byId = (id) => document.getElementById(id);

export function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function shape(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== undefined && value !== null) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== undefined && child !== null));
  return node;
}

// Replaces the children of `node` only where they say something new, so that a selection survives.
export function put(node, ...children) {
  const now = element("div", {}, ...children);
  if (node.innerHTML !== now.innerHTML) node.replaceChildren(...now.childNodes);
}
