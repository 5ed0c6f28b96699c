package tunnel

// A Queue lists what clients have pending, oldest first. Where there is too
// much of it, the oldest of the client that has most makes room: whoever fills
// the queue loses its own places, and a newcomer always finds one. All /64s of
// one /48 count as one client here.
//
// It locks nothing: whoever uses it does. The zero value is ready.
type Queue[T any] struct {
	n              int
	oldest, newest *Place[T]
	lines          map[*Client]*line[T]
	lengths        []lineList[T] // the lines by how many places they have
	longest        int
	spare          *line[T] // one that is empty, to be used again
}

// A Place is one entry of a Queue. It is zero while it is in none but for its
// Value.
type Place[T any] struct {
	Value T

	line         *line[T] // nil where it is in no Queue
	older, newer *Place[T]
	prev, next   *Place[T] // of the same client
}

// A line is what one client has in the queue.
type line[T any] struct {
	client         *Client
	n              int
	oldest, newest *Place[T]
	prev, next     *line[T] // of those with as many places
}

type lineList[T any] struct{ first, last *line[T] }

// Len returns how many places are taken.
func (q *Queue[T]) Len() int { return q.n }

// Oldest returns the place that was taken first, nil where there is none.
func (q *Queue[T]) Oldest() *Place[T] { return q.oldest }

// Next returns the place that was taken next after p, nil where there is none.
func (p *Place[T]) Next() *Place[T] { return p.newer }

// Listed reports whether p is in a Queue.
func (p *Place[T]) Listed() bool { return p.line != nil }

// Victim returns the oldest place of the client that has most, nil where there
// is none. Of several such clients it is the one that has had as many for
// longest.
func (q *Queue[T]) Victim() *Place[T] {
	if q.n == 0 {
		return nil
	}
	return q.lengths[q.longest].first.oldest
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
	p.line, p.prev, p.older = l, l.newest, q.newest
	if l.newest != nil {
		l.newest.next = p
	} else {
		l.oldest = p
	}
	if q.newest != nil {
		q.newest.newer = p
	} else {
		q.oldest = p
	}
	l.newest, q.newest = p, p
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
	if p.prev != nil {
		p.prev.next = p.next
	} else {
		l.oldest = p.next
	}
	if p.next != nil {
		p.next.prev = p.prev
	} else {
		l.newest = p.prev
	}
	if p.older != nil {
		p.older.newer = p.newer
	} else {
		q.oldest = p.newer
	}
	if p.newer != nil {
		p.newer.older = p.older
	} else {
		q.newest = p.older
	}
	p.line, p.prev, p.next, p.older, p.newer = nil, nil, nil, nil, nil
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
		q.lengths = append(q.lengths, lineList[T]{})
	}
	same := &q.lengths[l.n]
	if l.prev = same.last; l.prev != nil {
		l.prev.next = l
	} else {
		same.first = l
	}
	same.last = l
	q.longest = max(q.longest, l.n)
}

// unlist takes l from the lines that have as many places.
func (q *Queue[T]) unlist(l *line[T]) {
	same := &q.lengths[l.n]
	if l.prev != nil {
		l.prev.next = l.next
	} else {
		same.first = l.next
	}
	if l.next != nil {
		l.next.prev = l.prev
	} else {
		same.last = l.prev
	}
	l.prev, l.next = nil, nil
	for q.longest > 0 && q.lengths[q.longest].first == nil {
		q.longest--
	}
}
