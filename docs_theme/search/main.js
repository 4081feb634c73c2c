// Search that works on pages opened from disk, in place of MkDocs' own, whose worker browsers load from servers alone:
// the index is a script (search/index.js, written by docs_theme/hooks.py), searched on the page itself.
(function () {
  const input = document.getElementById("mkdocs-search-query");
  if (!input) return; // every page loads this; only search.html searches

  const found = document.getElementById("mkdocs-search-results");
  const at = path => base_url.replace(/\/$/, "") + "/" + path;

  function load(path, then) {
    const script = document.createElement("script");
    script.src = at(path);
    script.onload = then;
    script.onerror = () => { found.textContent = "The index of the search is missing: " + path; };
    document.head.appendChild(script);
  }

  function shown(doc) {
    const article = document.createElement("article"), title = document.createElement("h3");
    const link = document.createElement("a"), text = document.createElement("p");
    link.href = at(doc.location);
    link.textContent = doc.title;
    title.append(link);
    text.textContent = doc.text.substring(0, 200);
    article.append(title, text);
    return article;
  }

  function start() {
    const data = window.memoptSearchIndex, documents = {};
    lunr.tokenizer.separator = new RegExp(data.config.separator);
    const index = lunr(function () {
      this.field("title", { boost: 5 });
      this.field("text");
      this.ref("location");
      data.docs.forEach(doc => { this.add(doc); documents[doc.location] = doc; });
    });

    function search() {
      const words = input.value.split(/[^\p{L}\p{N}_.]+/u).filter(word => word);
      let results = [];
      if (input.value.length >= data.config.min_search_length) {
        const query = wildcard => index.query(q => words.forEach(word => q.term(lunr.tokenizer(word), {
          wildcard, usePipeline: wildcard === lunr.Query.wildcard.NONE, presence: lunr.Query.presence.REQUIRED })));
        results = query(lunr.Query.wildcard.NONE);
        if (!results.length) results = query(lunr.Query.wildcard.TRAILING);
      }
      const articles = results.map(result => shown(documents[result.ref]));
      found.replaceChildren(...(articles.length ? articles : [found.dataset.noResultsText]));
    }

    input.addEventListener("keyup", search);
    input.value = new URLSearchParams(window.location.search).get("q") || "";
    search();
  }

  load("search/lunr.js", () => load("search/index.js", start));
})();
