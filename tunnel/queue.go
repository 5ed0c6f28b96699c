package tunnel

// A Queue lists what clients have pending, oldest first. Where there is too
// much of it, the oldest of the client that has most makes room: whoever fills
// the queue loses its own places, and a newcomer always finds one. All /64s of
// one /48 count as one client here.
//
// It locks nothing: whoever uses it does. The zero value is ready.
type Queue[T any] struct {
	n       int
	places  list[*Place[T]] // oldest first
	lines   map[*Client]*line[T]
	lengths []list[*line[T]] // the lines by how many places they have
	longest int
	spare   *line[T] // one that is empty, to be used again
}

// A Place is one entry of a Queue. It is zero while it is in none but for its
// Value.
type Place[T any] struct {
	Value T

	line         *line[T] // nil where it is in no Queue
	inAll, inOne node[*Place[T]]
}

// A line is what one client has in the queue.
type line[T any] struct {
	client *Client
	n      int
	places list[*Place[T]] // oldest first
	among  node[*line[T]]  // those with as many places
}

// Len returns how many places are taken.
func (q *Queue[T]) Len() int { return q.n }

// Oldest returns the place that was taken first, nil where there is none.
func (q *Queue[T]) Oldest() *Place[T] { return q.places.first.get() }

// Next returns the place that was taken next after p, nil where there is none.
func (p *Place[T]) Next() *Place[T] { return p.inAll.next.get() }

// Listed reports whether p is in a Queue.
func (p *Place[T]) Listed() bool { return p.line != nil }

// Victim returns the oldest place of the client that has most, nil where there
// is none. Of several such clients it is the one that has had as many for
// longest.
func (q *Queue[T]) Victim() *Place[T] {
	if q.n == 0 {
		return nil
	}
	return q.lengths[q.longest].first.get().places.first.get()
}

// Add puts p, which is in no Queue, behind all others. The client's account is
// the caller's to keep for as long as p is listed.
func (q *Queue[T]) Add(p *Place[T], c *Client) {
	if c.site != nil {
		c = c.site
	}
	l := q.lines[c]
	if l == nil {
		if l, q.spare = q.spare, nil; l == nil {
			l = &line[T]{}
		}
		l.client = c
		if q.lines == nil {
			q.lines = make(map[*Client]*line[T])
		}
		q.lines[c] = l
	} else {
		q.unlist(l)
	}
	p.line = l
	q.places.add(&p.inAll, p)
	l.places.add(&p.inOne, p)
	l.n++
	q.n++
	q.list(l)
}

// Remove takes p out. It does nothing where p is in no Queue.
func (q *Queue[T]) Remove(p *Place[T]) {
	l := p.line
	if l == nil {
		return
	}
	q.unlist(l)
	p.line = nil
	q.places.remove(&p.inAll)
	l.places.remove(&p.inOne)
	l.n--
	q.n--
	if l.n > 0 {
		q.list(l)
		return
	}
	delete(q.lines, l.client)
	l.client = nil
	q.spare = l
}

// list puts l behind the lines that have as many places.
func (q *Queue[T]) list(l *line[T]) {
	for len(q.lengths) <= l.n {
		q.lengths = append(q.lengths, list[*line[T]]{})
	}
	q.lengths[l.n].add(&l.among, l)
	q.longest = max(q.longest, l.n)
}

// unlist takes l from the lines that have as many places.
func (q *Queue[T]) unlist(l *line[T]) {
	q.lengths[l.n].remove(&l.among)
	for q.longest > 0 && q.lengths[q.longest].first == nil {
		q.longest--
	}
}

// A list is doubly linked, and its nodes are part of what they list: it takes
// no memory of its own. The zero value is empty.
type list[T any] struct{ first, last *node[T] }

// A node is a place in one list, of a pointer to what it is part of.
type node[T any] struct {
	of         T
	prev, next *node[T]
}

// get returns what n is part of, the zero value where n is nil.
func (n *node[T]) get() (of T) {
	if n != nil {
		of = n.of
	}
	return of
}

// add puts n, which is in no list and part of what is given, behind all others.
func (l *list[T]) add(n *node[T], of T) {
	n.of, n.prev = of, l.last
	if n.prev != nil {
		n.prev.next = n
	} else {
		l.first = n
	}
	l.last = n
}

// remove takes out n, which is in l.
func (l *list[T]) remove(n *node[T]) {
	if n.prev != nil {
		n.prev.next = n.next
	} else {
		l.first = n.next
	}
	if n.next != nil {
		n.next.prev = n.prev
	} else {
		l.last = n.prev
	}
	*n = node[T]{}
}
