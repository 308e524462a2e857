// The scores of search results. An index entry is the id of a clause. The search for an id lists its clause first, with the title of
// the clause. A part of an id, such as "share", lists the clauses last: the pages about the word come first.
var Scorer = {
  score: result => {
    const [docname, title, anchor, , score, , kind] = result;
    if (kind !== "index") return score;
    const { alltitles, docnames } = Search._index;
    const isHere = ([file, id]) => docnames[file] === docname && `#${id}` === anchor;
    const section = Object.keys(alltitles).find(each => alltitles[each].some(isHere));
    if (section) result[1] = `${title} > ${section}`;
    return score === 100 ? score : 0;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
