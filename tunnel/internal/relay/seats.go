package relay

// Seats hold items, each in a seat of its own for as long as it is there. No item
// moves, so whoever looks at them piece by piece sees every one that was there before
// and is there after. The zero value is empty. A lock of its user's guards it.
type Seats[T any] struct {
	seats []seat[T]
	free  []int32
}

type seat[T any] struct {
	item  T
	taken bool
}

// Add gives item a seat.
func (s *Seats[T]) Add(item T) (at int32) {
	if n := len(s.free); n > 0 {
		at = s.free[n-1]
		s.free = s.free[:n-1]
		s.seats[at] = seat[T]{item, true}
		return at
	}
	s.seats = append(s.seats, seat[T]{item, true})
	return int32(len(s.seats) - 1)
}

// Remove frees the seat that Add returned.
func (s *Seats[T]) Remove(at int32) {
	s.seats[at] = seat[T]{}
	if s.free = append(s.free, at); len(s.free) == len(s.seats) {
		*s = Seats[T]{} // nobody is seated: the memory goes, too
	}
}

// Len returns how many items there are.
func (s *Seats[T]) Len() int { return len(s.seats) - len(s.free) }

// seatsPiece is how many seats are looked at while a lock is held: a few microseconds.
const seatsPiece = 4096

// Piece appends the items of the seats from the given one on to the slice, of some
// seats only, and returns the seat to go on from. There are no more where that is 0.
func (s *Seats[T]) Piece(from int, to []T) (next int, items []T) {
	end := min(from+seatsPiece, len(s.seats))
	for i := min(from, end); i < end; i++ {
		if s.seats[i].taken {
			to = append(to, s.seats[i].item)
		}
	}
	if end == len(s.seats) {
		end = 0
	}
	return end, to
}

// All returns every item, in the order of the seats.
func (s *Seats[T]) All() []T {
	all := make([]T, 0, s.Len())
	for i := range s.seats {
		if s.seats[i].taken {
			all = append(all, s.seats[i].item)
		}
	}
	return all
}
